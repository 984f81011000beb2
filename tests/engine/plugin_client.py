"""Calls a plug-in's executable as the engine does, without the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from tests.engine.plugin import Failure, Found, plain, struct

PLUGINS = Path(__file__).parent / "plugins"
STACK = "dev"
PATIENCE_S = 240


class CallRefused(Exception):
    """An error answer of the plug-in."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class PluginClient:
    """A running plug-in. Values are plain, with the markers of `infra.check.recording`."""

    def __init__(self, name: str, environment: Mapping[str, str], configuration: Mapping[str, Any]) -> None:
        self.process = subprocess.Popen(
            [str(PLUGINS / f"pulumi-resource-{name}")],
            env={**os.environ, "PLUGIN_PYTHON": sys.executable, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{int(self.process.stdout.readline())}")
        self.stub = provider_pb2_grpc.ResourceProviderStub(self._channel)
        configure = provider_pb2.ConfigureRequest(args=struct(configuration), acceptSecrets=True)
        try:
            self.version = self._call(self.stub.GetPluginInfo, _empty()).version
            self._call(self.stub.Configure, configure)
        except CallRefused:
            self.close()
            raise

    def check_provider(self, inputs: Mapping[str, Any]) -> list[Failure]:
        request = provider_pb2.CheckRequest(urn=urn_of("pulumi:providers:gcp", "google"), news=struct(inputs))
        return _failures(self._call(self.stub.CheckConfig, request))

    def check(self, type_: str, inputs: Mapping[str, Any], name: str = "it") -> list[Failure]:
        request = provider_pb2.CheckRequest(urn=urn_of(type_, name), type=type_, name=name, news=struct(inputs))
        return _failures(self._call(self.stub.Check, request))

    def create(
        self, type_: str, inputs: Mapping[str, Any], name: str = "it", *, preview: bool = False
    ) -> tuple[str, dict[str, Any]]:
        request = provider_pb2.CreateRequest(
            urn=urn_of(type_, name), type=type_, name=name, properties=struct(inputs), preview=preview
        )
        answer = self._call(self.stub.Create, request)
        return answer.id, plain(answer.properties)

    def read(
        self, type_: str, id_: str, inputs: Mapping[str, Any] | None = None, state: Mapping[str, Any] | None = None
    ) -> Found | None:
        request = provider_pb2.ReadRequest(
            urn=urn_of(type_, "it"), type=type_, id=id_, inputs=struct(inputs or {}), properties=struct(state or {})
        )
        answer = self._call(self.stub.Read, request)
        if not answer.id:
            return None
        return Found(id=answer.id, state=plain(answer.properties), inputs=plain(answer.inputs))

    def diff(
        self, type_: str, old: Mapping[str, Any], new: Mapping[str, Any], *, ignore: Sequence[str] = ()
    ) -> tuple[list[str], list[str]]:
        """Return the paths that differ, and the keys that cause a replacement."""
        request = provider_pb2.DiffRequest(
            id="it", urn=urn_of(type_, "it"), type=type_, old_inputs=struct(old), news=struct(new), ignoreChanges=ignore
        )
        answer = self._call(self.stub.Diff, request)
        assert (answer.changes == provider_pb2.DiffResponse.DIFF_SOME) is bool(answer.detailedDiff)
        return sorted(answer.detailedDiff), list(answer.replaces)

    def update(
        self,
        type_: str,
        id_: str,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        request = provider_pb2.UpdateRequest(
            id=id_,
            urn=urn_of(type_, "it"),
            type=type_,
            old_inputs=struct(old),
            olds=struct(state or old),
            news=struct(new),
        )
        return plain(self._call(self.stub.Update, request).properties)

    def delete(self, type_: str, id_: str, state: Mapping[str, Any]) -> None:
        request = provider_pb2.DeleteRequest(id=id_, urn=urn_of(type_, "it"), type=type_, properties=struct(state))
        self._call(self.stub.Delete, request)

    def cancel(self) -> None:
        self._call(self.stub.Cancel, _empty())

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=PATIENCE_S)
        except grpc.RpcError as problem:
            raise CallRefused(problem.details(), problem.code()) from problem

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def urn_of(type_: str, name: str) -> str:
    return f"urn:pulumi:{STACK}::research-runtime::{type_}::{name}"


def _failures(answer: Any) -> list[Failure]:
    return [Failure(each.property, each.reason) for each in answer.failures]


def _empty() -> Any:
    from google.protobuf import empty_pb2

    return empty_pb2.Empty()
