"""The shim's command line.

    shim.py FOLDER [--bucket URL] [--native ID] [--index I | --indices A-B] [--scratch FOLDER]

The shim carries out `order.json` in the job's folder, decides by the files there, and writes only there and to a scratch
folder of the machine. docs/shim.md describes the folder and each rule.
"""

import argparse
import os
import sys

from runtime.shim.common import AGAIN, BEGAN, DONE, DUPLICATE, LOST, REFUSED, AlreadyClaimed, OrderRefused, say, worst
from runtime.shim.files import (
    close_job,
    fold_job,
    folded_path,
    is_being_launched,
    list_names,
    make_folder,
    read_header,
    unfold,
)
from runtime.shim.processes import StopRequests, adopt_orphans
from runtime.shim.record import FolderRecord, RunRecord, claim_job, drop_open, load_order
from runtime.shim.run_loop import serve, serve_node, serve_rank
from runtime.shim.tree_walk import remove_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List


def parse_indices(text):
    found: List[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def forget_secrets(order, folder):
    """Remove the files of secrets once every index has its result; the last shim does it."""
    if not order.get("secrets"):
        return
    job = os.path.basename(folder)
    names = list_names(os.path.join(os.path.dirname(os.path.dirname(folder)), "done"))
    ended = {name.split(".")[1] for name in names if name.startswith(job + ".") and name.count(".") == 4}
    if ended.issuperset(order["runs"]):
        remove_folder(os.path.join(folder, "secrets"))


def end_job(order, record, part, urls):
    """Do what is due after the last result of a job: messages about it, and no more of what only an open job needs."""
    if order.get("notify"):
        from runtime.shim.notify import notify

        notify(order, record, urls)
    forget_secrets(order, record.folder)
    drop_open(order, record, part)
    close_job(order, record)


def parse_index(given):
    return sum(map(int, given.split("+")))


def parse_place(given):
    first, _, rest = given.partition("+")
    count, _, nodes = rest.partition("/")
    return int(first) + int(count) // int(nodes), int(count) % int(nodes)


def main(words):
    parser = argparse.ArgumentParser(description="Runs a job by the order in its folder.")
    parser.add_argument("folder", help="the job's run folder")
    parser.add_argument("--native", default="local", help="the backend's own id of this job")
    parser.add_argument("--member", help="its id of this array member, where that differs")
    parser.add_argument("--part", type=int, help="which part of the job this native job is, where there are several")
    text = "run this index; a sum such as 8+3 where the backend counts from 0"
    parser.add_argument("--index", type=parse_index, help=text)
    parser.add_argument("--node", type=int, default=0, help="which node of the run this machine is, if it has several")
    text = "run and node where the backend counts the nodes of all runs from 0: FIRST+COUNT/NODES"
    parser.add_argument("--place", type=parse_place, help=text)
    parser.add_argument("--indices", type=parse_indices, help="run these, such as 0-7,9, in turn or packed")
    parser.add_argument(
        "--bucket", help="the record root, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX; FOLDER is then this machine's own"
    )
    parser.add_argument("--scratch", help="folder on this machine for trees; the system's temporary one by default")
    parser.add_argument("--prepare", action="store_true", help="make the job's environment and run nothing")
    parser.add_argument("--clear", action="store_true", help="end what killed shims of the job left running here")
    parser.add_argument(
        "--fold", nargs="+", metavar="JOB", help="put what has ended into few files; FOLDER is the root"
    )
    parser.add_argument("--unfold", nargs="+", metavar="INDEX", help="the other way round, for a job that goes on")
    parser.add_argument(
        "--drop", nargs="+", metavar="TREE", help="remove shared trees that no attempt on this machine uses"
    )
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.place:
        options.index, options.node = options.place
    folder = os.path.abspath(options.folder)
    os.environ["RUNTIME_SHIM_BEGAN"] = repr(BEGAN)
    if options.fold:
        return fold_all(folder, options.fold)
    if options.unfold:
        for start in [""] + ["runs/" + index for index in options.unfold]:
            unfold(folder, start)
        return DONE
    if options.drop:
        from runtime.shim.tree import drop_trees

        sys.stdout.write("".join(tree + "\n" for tree in drop_trees(options.drop)))
        return DONE
    asked = StopRequests()
    adopt_orphans()
    if options.scratch:
        make_folder(options.scratch)
    if options.bucket:
        from runtime.shim.bucket_record import run

        return run(options, folder, lambda record: follow(record, options, asked))
    return follow(FolderRecord(folder), options, asked)


def fold_all(root, jobs):
    """Fold jobs that have ended; prints the ids of the jobs that were not folded before."""
    for name in jobs:
        job = os.path.join(root, "jobs", name)
        try:
            if os.path.exists(os.path.join(job, "intent.json")) and not is_being_launched(job):
                fold_job(job, load_order(job))
                sys.stdout.write(name + "\n")
        except (OrderRefused, IOError, OSError, ValueError) as problem:
            say("cannot fold %s: %s" % (name, problem))
    return DONE


def follow(record, options, asked):
    """Carry out the order in the record's folder; returns an exit code."""
    folder = record.folder
    if options.clear and read_header(folded_path(folder, ""))[0]:
        return DONE  # the job has ended, and its shims left nothing
    try:
        if options.clear:
            for name in list_names(os.path.join(folder, "runs")):
                RunRecord(record, name).clear()
            return DONE
        order = load_order(folder)
        if options.prepare:
            from runtime.shim.environment import prepare

            return prepare(order, folder, options, asked)
        if options.rank_of:
            return serve_rank(order, folder, options, asked)
        part = order.get("part", 0) if options.part is None else options.part
        claim_job(record, order.get("epoch", 1), part, options.native)
    except OrderRefused as problem:
        say(str(problem))
        return REFUSED
    except (IOError, OSError) as problem:
        say("cannot begin: %s" % problem)
        return REFUSED
    except AlreadyClaimed as owner:
        say("this is a twin: the job is served by %s" % owner)
        return DUPLICATE
    indices = [options.index] if options.index is not None else options.indices or [0]
    if options.node and not (order.get("meet") and options.node < order["nodes"]):
        say("the order has no node %d that runs on a machine of its own" % options.node)
        return REFUSED
    unknown = [index for index in indices if str(index) not in order["runs"]]
    if unknown:
        say("the order has no index %d" % unknown[0])
        return REFUSED
    urls = {}
    if order.get("notify") and not options.node:
        from runtime.shim.notify import find_urls

        urls = find_urls(order, folder)
    if order.get("pack") and options.index is None:
        from runtime.shim.packed_runs import pack

        code = pack(order, record, indices, options, asked)
        end_job(order, record, part, urls)
        return code
    cpus = None
    if (order.get("limits") or {}).get("cpus"):
        from runtime.shim.cpus import keep_to_share

        cpus = keep_to_share(order["limits"])
    codes = []
    for index in indices:
        if options.node:
            codes.append(serve_node(order, record, index, options, asked))
        else:
            codes.append(serve(order, record, index, options, asked, {}))
        if asked.stop:
            break
    if cpus:
        cpus.drop()
    if not options.node:
        end_job(order, record, part, urls)
    code = worst(codes)
    return LOST if code == AGAIN and asked.stop and order.get("retries") == "backend" else code
