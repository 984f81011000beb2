"""Changes of Ray in the processes of the lab, where Ray has no setting: the addresses of the Google clients of the head's
autoscaler, and how long a node may take to start."""

import importlib.abc
import importlib.util
import json
import os
import sys
import time

ENDPOINTS = "LAB_ENDPOINTS"
START_S = 240.0


class Hook(importlib.abc.MetaPathFinder):
    """Changes a module once it has run."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            self.change(module)

        spec.loader.exec_module = run_and_change
        return spec


def direct_to_fakes(config):
    from tests.services.ray_support import client_makers

    vars(config).update(client_makers(config, json.loads(os.environ[ENDPOINTS])))


def wait_longer(services):
    """Ray gives up a node that the head does not list after 30 s, which a machine that is busy with other tests takes."""
    get_node = services.get_node

    def get_node_in_time(*args, **kwargs):
        until = time.monotonic() + START_S
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    services.get_node = get_node_in_time


sys.meta_path.insert(0, Hook("ray._private.services", wait_longer))
if ENDPOINTS in os.environ:
    sys.meta_path.insert(0, Hook("ray.autoscaler._private.gcp.config", direct_to_fakes))
