"""A command on typer as lean as it gets: no completion, no rich markup, no pretty exceptions."""

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def least(level: int = 0) -> None:
    """Does nothing."""


app()
