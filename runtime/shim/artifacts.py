"""The artifacts of a run: files and folders by tag, restored before an attempt begins, saved while it runs and at its end.

- `runs/INDEX/artifacts/TAG/gGENERATION.aATTEMPT.nNUMBER.TOKEN.json` is a version, as a store of artifacts names it.
- `runs/INDEX/artifacts/data/SHA256` are the bytes of a file of any of the run's versions.
- `reuse/TAG.json` and `reuse/data/SHA256` are a version that all attempts of the job begin with, left by the launch.
"""

import json
import os
import re
import threading
import time

from runtime.shim.common import LOOK_S, SetupFailed, TransferStopped, say
from runtime.shim.file_manifest import (
    KEPT,
    UnsuitableFile,
    copy_file,
    from_text,
    is_content,
    is_settled,
    look,
    restore_files,
    tell,
)
from runtime.shim.files import PASSING, WRITE_AGAIN_S, WRITE_PATIENCE_S, drop_file, list_names, make_folder, token
from runtime.shim.tree import UnsafeName
from runtime.shim.tree_walk import remove_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Set, Tuple

AGAIN_S = 10.0
"""The longest time until a save that failed is tried again."""
REUSED = "reuse"
"""Folder of the job with what all its attempts begin with."""
_VERSION = re.compile(r"g[0-9]{7}\.a([0-9]{6})\.n[0-9]{8}\.[A-Za-z0-9]{1,64}\.json$")


class NoArtifact(SetupFailed):
    """An artifact that cannot be brought, however often it is tried."""

    reason = "config_invalid"


def list_versions(record, place):
    """(attempt, name) of the versions of a tag, the newest first."""
    found = [(_VERSION.match(name), name) for name in record.names(place)]
    return sorted(
        [(int(match.group(1)), name) for match, name in found if match], key=lambda each: each[1], reverse=True
    )


def read_list(record, name):
    """A list and what else is in it; None if it is gone or no list."""
    try:
        said = json.loads(record.read(name) or "null")
        return said if isinstance(said, dict) and isinstance(said["files"], dict) else None
    except (ValueError, KeyError):
        return None


def restore_to(record, said, data, path, stage, give_up):
    """Put a version in the place of `path`, whole or not at all; returns why it cannot be used, None if it is there.

    `stage` is a folder on the same file system. Raises `TransferStopped`, `IOError` and `OSError`.
    """
    remove_folder(stage)
    folder = os.path.join(stage, "files")
    os.makedirs(folder)
    try:
        files = said["files"]
        whole = restore_files(
            files, folder, stage, lambda content, one: record.get_file(data + "/" + content, one, give_up), inside=True
        )
        if not whole:
            return "a file of it is gone, or has other bytes than it names"
        made = os.path.join(folder, from_text(next(iter(files)))) if said.get("single") else folder
        left = remove_folder(path)
        if left is not None:
            raise left
        make_folder(os.path.dirname(path))
        os.rename(made, path)
    except (UnsafeName, KeyError, TypeError, AttributeError, StopIteration) as problem:
        return "its list is refused: %s" % problem
    finally:
        remove_folder(stage)
    return None


class Artifact(object):
    """The versions of one tag that an attempt saves. `there` are the contents that the record has for the run."""

    def __init__(self, run, tag, path, folder, stage, there):
        self.record, self.job, self.tag, self.named = run.record, run.job, tag, path
        self.path = os.path.join(folder, path)
        self.stage, self.there = stage, there
        self.place, self.data = "%s/artifacts/%s" % (run.name, tag), run.name + "/artifacts/data"
        self.began: "Set[str]" = set()
        """Contents of the version that the attempt began with."""
        self.contents: "Dict[Tuple[str, Any], str]" = {}
        """(name, status of the file) → content id, of files that were read before."""
        self.last: "Optional[Dict[str, Any]]" = None
        """The last version of this attempt."""
        self.seen: "Any" = None
        """What that version was made of."""
        self.mine: "List[Tuple[str, Set[str]]]" = []
        """Versions of this attempt in the record, as (name, contents)."""

    def restore(self, stage, give_up):
        """Begin with the newest version that can be used, if there is any."""
        for _, name in list_versions(self.record, self.place):
            said = read_list(self.record, "%s/%s" % (self.place, name))
            if said is None:
                why: "Optional[str]" = "its list cannot be read"
            elif said.get("absent"):
                return
            else:
                why = restore_to(self.record, said, self.data, self.path, stage, give_up)
            if why is None and said is not None:
                self._know(said)
                return
            say("version %s of artifact `%s` cannot be used, an earlier one is taken: %s" % (name, self.tag, why))

    def _know(self, said):
        """Take the contents of a version that was just restored for stored, and its files for known."""
        self.began = contents_of(said)
        self.there.update(self.began)
        found, _ = look(self.path)
        for name, (kind, status) in (found or {}).items():
            about = said["files"].get(name or next(iter(said["files"]), ""), {})
            if kind == "file" and about.get("size") == status[0]:
                self.contents[name, status] = about["sha256"]

    def save(self, name, final, give_up, absent=False):
        """Save a version of that name if anything changed; returns whether there is a new one. The first one of an attempt
        is saved in any case, if there is anything.

        That it is gone is saved only with `absent`: an attempt that was killed may have been about to write it again.

        Raises `UnsuitableFile`, `IOError`, `OSError` and `TransferStopped`. Safe to call again.
        """
        found, left_out = look(self.path)
        looked = (found, left_out) if found is not None else None
        settled = all(kind != "file" or is_settled(status) for kind, status in (found or {}).values())
        if looked == self.seen and self.last is not None and not (final and not settled):
            return False
        if found is None and (self.last is None or not absent):
            return False
        files = self._send(found or {}, left_out, give_up)
        said: "Dict[str, Any]" = {"files": files}
        if found is not None and found[""][0] == "file" and files:
            said["single"] = True
        elif found is None or (found[""][0] == "file"):
            said["absent"] = True
        if left_out:
            said["left_out"] = tell(left_out)
        if self.last != said:
            self.record.write(
                "%s/%s" % (self.place, name), json.dumps(dict(said, at=time.time()), sort_keys=True), _once
            )
            self.mine.append((name, contents_of(said)))
        new, self.last, self.seen = self.last != said, said, looked
        return new

    def _send(self, found, left_out, give_up):
        """Return the list's entry of each file, once its bytes are stored."""
        files = {}
        for name, (kind, status) in sorted(found.items()):
            if give_up is not None and give_up():
                raise TransferStopped(self.tag)
            if kind == "link":
                files[name] = {"link": status}
            elif kind == "folder":
                if name:
                    files[name] = {"folder": True}
            else:
                shown = name or os.path.basename(self.path)
                path = os.path.join(self.path, from_text(name)) if name else self.path
                try:
                    files[shown] = self._send_file(name, path, status, give_up)
                except (FileNotFoundError, PermissionError) as problem:
                    if problem.filename != path:
                        raise  # it is the record's
                    if isinstance(problem, PermissionError):
                        left_out[shown] = "cannot be read: %s" % problem.strerror
        return files

    def _send_file(self, name, path, status, give_up):
        content = self.contents.get((name, status))
        if content is None or content not in self.there:
            make_folder(self.stage, within=self.job)
            copy = os.path.join(self.stage, "one")
            try:
                content, status = copy_file(path, copy)
                if content not in self.there:
                    self.record.put_file("%s/%s" % (self.data, content), copy, give_up)
                    self.there.add(content)
            except (IOError, OSError):
                drop_file(copy)  # a copy that does not fit would keep a full disk full
                raise
            if is_settled(status):
                self.contents[name, status] = content
        return {"sha256": content, "size": status[0], "mode": status[1]}

    def kept(self):
        """Contents that have to stay."""
        return self.began.union(*[contents for _, contents in self.mine[-KEPT:]])

    def describe(self):
        """Return a note for people on the last version; None if it is whole."""
        if self.last is None or self.last.get("absent"):
            return "no artifact `%s`: there is no `%s`" % (self.tag, self.named)
        said = self.last.get("left_out")
        return "left out of artifact `%s`: %s" % (self.tag, said) if said else None


def contents_of(said):
    return {about["sha256"] for about in said["files"].values() if "sha256" in about}


def _once():
    """Give up a write that is refused: the next save tries again."""
    return True


class AttemptArtifacts(object):
    """The artifacts of one attempt in its `tree`; `scratch` is the attempt's folder on this machine, around the tree."""

    def __init__(self, order, run, number, tree, scratch):
        named = order["artifacts"]
        self.run, self.number, self.tree, self.scratch = run, number, tree, scratch
        folder = os.path.normpath(os.path.join(tree, (order.get("call") or {}).get("folder") or ""))
        self.folder = folder
        """The folder that the command starts in."""
        self.every = named.get("every_s", 60.0)
        self.reuse = sorted(named.get("reuse") or {})
        self.named = named.get("variables") or {}
        self.token = token()
        self.there: "Set[str]" = set()
        self.data = run.name + "/artifacts/data"
        self.stage = os.path.join(run.folder, "artifacts", ".a%04d" % number)
        paths = sorted((named.get("capture") or {}).items())
        self.captured = [Artifact(run, tag, path, folder, self.stage, self.there) for tag, path in paths]
        self.number_of_next = 1
        self.ended = threading.Event()
        self.thread: "Optional[threading.Thread]" = None

    def variables(self):
        found = {name: os.path.join(self.folder, path) for name, path in self.named.items()}
        return dict(found, RUNTIME_ARTIFACTS=os.path.join(self.folder, "artifacts"))

    def restore(self, give_up):
        """Bring what the attempt begins with. Raises `SetupFailed`."""
        stage, tag = os.path.join(self.scratch, "bringing"), ""
        root = os.path.realpath(self.tree)
        for tag, path in [(tag, "artifacts/" + tag) for tag in self.reuse] + [
            (each.tag, each.named) for each in self.captured
        ]:
            parent = os.path.realpath(os.path.dirname(os.path.join(self.folder, path)))
            if parent != root and not parent.startswith(root + os.sep):
                raise NoArtifact("the place `%s` of artifact `%s` leads out of the snapshot" % (path, tag))
        try:
            for tag in self.reuse:
                said = read_list(self.run.record, "%s/%s.json" % (REUSED, tag))
                to = os.path.join(self.folder, "artifacts", tag)
                why = "its list is gone" if said is None else None
                why = why or restore_to(self.run.record, said, REUSED + "/data", to, stage, give_up)
                if why:
                    raise NoArtifact("the version that the job reuses as `%s` cannot be used: %s" % (tag, why))
            for each in self.captured:
                tag = each.tag
                each.restore(stage, give_up)
        except TransferStopped:
            raise SetupFailed("artifact `%s` was being brought, and this attempt was not wanted any more" % tag)
        except (IOError, OSError) as problem:
            raise SetupFailed("cannot bring artifact `%s`: %s" % (tag, problem))

    def begin(self):
        """Save each interval from now on."""
        if self.captured:
            self.thread = threading.Thread(target=self._go)
            self.thread.daemon = True
            self.thread.start()

    def _go(self):
        pause = self.every
        while not self.ended.wait(pause):
            began = time.monotonic()
            try:
                problems = self._save(False, self.ended.is_set)
            except TransferStopped:
                return
            except Exception as other:
                problems = [(self.captured[0].tag, other)]
            for each in problems:
                say("cannot save artifact `%s`, tries again: %s" % each)
            pause = min(self.every, AGAIN_S) if problems else max(0.0, self.every - (time.monotonic() - began))

    def _save(self, final, give_up, absent=False):
        """Save what changed; returns the tags that could not be saved, with the reasons."""
        problems = []
        for each in self.captured:
            try:
                name = "g0000001.a%06d.n%08d.%s.json" % (self.number, self.number_of_next, self.token)
                if each.save(name, final, give_up, absent):
                    self.number_of_next += 1
            except (IOError, OSError, UnsuitableFile) as problem:
                problems.append((each.tag, problem))
        self._drop_old()
        return problems

    def _save_last(self, succeeded):
        try:
            # Files that another shim, taken for dead, has removed are sent again.
            self.there.intersection_update(self.run.record.names(self.data) if self.there else ())
        except (IOError, OSError) as problem:
            return [(self.captured[0].tag, problem)]
        return self._save(True, None, absent=succeeded)

    def _drop_old(self):
        """Remove older versions of this attempt, and then bytes that they alone name; nothing once another attempt has begun."""
        old = [(each, name, contents) for each in self.captured for name, contents in each.mine[:-KEPT]]
        if not old or self.run.is_overtaken(self.number):
            return
        used: "Set[str]" = set().union(*[each.kept() for each in self.captured])
        for each, name, contents in old:
            self.run.record.remove("%s/%s" % (each.place, name))
            each.mine.remove((name, contents))
            for content in sorted(contents - used):
                self.there.discard(content)
                self.run.record.remove("%s/%s" % (self.data, content))

    def finish(self, succeeded, gives_up):
        """Save the last version of each tag; returns why one could not be saved, and what is not in them, each None if there is
        nothing to say.

        After a success a save is tried again while its problem may pass, until `gives_up()`.
        """
        self.ended.set()
        if self.thread is not None:
            self.thread.join()
        until = time.time() + (WRITE_PATIENCE_S if succeeded else 0.0)
        while True:
            problems = self._save_last(succeeded)
            passing = all(getattr(problem, "errno", None) in PASSING for _, problem in problems)
            if not problems or not passing or time.time() >= until or gives_up():
                break
            say("cannot save artifact `%s`, tries again: %s" % problems[0])
            again = time.time() + WRITE_AGAIN_S
            while time.time() < again and not gives_up():
                time.sleep(LOOK_S)
        remove_folder(self.stage)
        notes = [note for note in (each.describe() for each in self.captured) if note]
        failed = "; ".join("`%s`: %s" % each for each in problems)
        return "its artifact could not be saved: " + failed if failed else None, "; ".join(notes) or None


def clear_superseded(order, run, number):
    """Keep the last version that attempt `number`, whose success is recorded, left of each tag, and the bytes of these."""
    record, place = run.record, run.name + "/artifacts"
    if run.is_overtaken(number):
        return
    used: "Set[str]" = set()
    for tag in order["artifacts"].get("capture") or {}:
        mine = True
        for attempt, name in list_versions(record, "%s/%s" % (place, tag)):
            name = "%s/%s/%s" % (place, tag, name)
            said = read_list(record, name) if attempt == number and mine else None
            if said is not None:
                mine, used = False, used | contents_of(said)
            else:
                record.remove(name)
    for content in record.names(place + "/data"):
        if is_content(content) and content not in used:
            record.remove("%s/data/%s" % (place, content))
    for name in list_names(os.path.join(run.folder, "artifacts")):
        if name.startswith(".a"):
            remove_folder(os.path.join(run.folder, "artifacts", name))
