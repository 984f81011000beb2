"""`runtime cluster`: look after Ray clusters on TPUs."""

from __future__ import annotations

from runtime.cli.clusters.buffer import buffer
from runtime.cli.clusters.config import config
from runtime.cli.clusters.login import attach, dashboard, exec_
from runtime.cli.clusters.members import add, remove
from runtime.cli.clusters.reap import reap
from runtime.cli.clusters.restart import restart
from runtime.cli.clusters.status import list_, status
from runtime.cli.clusters.stop import stop
from runtime.cli.commands import new_app

app = new_app("Look after Ray clusters on TPUs.")
app.command("list")(list_)
app.command()(status)
app.command()(config)
app.command()(attach)
app.command("exec")(exec_)
app.command()(dashboard)
app.command()(add)
app.command()(remove)
app.command()(reap)
app.command()(buffer)
app.command()(restart)
app.command()(stop)
