"""A launch writes its intent after it submitted."""

SCENARIO = "jobs"
LAW = "what runs is in the ledger"
EDITS = [
    (
        "runtime.client.jobs.launch:_carry_out",
        """\
                _remove_secrets(plan, files)
""",
        """\
                _remove_secrets(plan, files)
        files.create(f"{plan.folder}/intent.json", _json(_intent(prepared, None)))
""",
    ),
    (
        "runtime.client.jobs.launch:_write_down",
        """\
        FileToWrite(f"{plan.folder}/intent.json", _json(_intent(prepared, state)), once=True),
""",
        """\
""",
    ),
]
