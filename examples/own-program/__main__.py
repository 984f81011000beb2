"""A program of your own that takes two components from research-runtime and nothing else.

It makes the decisions that the components leave to their caller: the provider, the names, the users, and the exports.
"""

import pulumi
import pulumi_gcp

from infra.components.queue import Queue, QueueArgs
from infra.components.records import Records, RecordsArgs
from infra.components.shared import StackSite
from infra.naming import Names, labels
from infra.settings.model import QueueSettings, RecordsSettings

config = pulumi.Config()
project, region = config.require("project"), config.require("region")
worker = {"worker": config.require("worker")}

provider = pulumi_gcp.Provider("google", project=project, region=region)
opts = pulumi.ResourceOptions(providers=[provider])
site = StackSite(
    project=project,
    region=region,
    names=Names(stack=f"curation-{pulumi.get_stack()}", project=project),
    labels=labels(pulumi.get_stack(), {"team": "curation"}),
    protect=pulumi.get_stack() == "production",
)

queue = Queue(
    "crops-queue",
    QueueArgs(site=site, queue="crops", settings=QueueSettings(ack_deadline_s=120), workers=worker),
    opts,
)
records = Records("records", RecordsArgs(site=site, settings=RecordsSettings(logs_days=14), users=worker), opts)

pulumi.export("topic", queue.topic)
pulumi.export("subscription", queue.subscription)
pulumi.export("records", records.url)
