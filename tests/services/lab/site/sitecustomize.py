"""Directs the Google clients of the head's autoscaler to the fake APIs: Ray has no setting for their addresses."""

import importlib.abc
import importlib.util
import json
import os
import sys

NAME = "ray.autoscaler._private.gcp.config"
ENDPOINTS = "LAB_ENDPOINTS"


class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            from tests.services.ray_support import client_makers

            vars(module).update(client_makers(module, json.loads(os.environ[ENDPOINTS])))

        spec.loader.exec_module = run_and_change
        return spec


if ENDPOINTS in os.environ:
    sys.meta_path.insert(0, Hook())
