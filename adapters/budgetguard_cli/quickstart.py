"""`budgetguard quickstart`: a bounded agent to start from, which runs without a key."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from budgetguard_cli.options import AsJson
from budgetguard_cli.screen import printable, refuse, write_json

Framework = Literal["langgraph", "openai-agents", "strands", "pydantic-ai", "loop", "openai"]
NEEDS = {
    "langgraph": ("langchain", '".[langchain]" in the checkout'),
    "openai-agents": ("agents", '".[openai-agents]" in the checkout'),
    "strands": ("strands", '".[strands]" in the checkout'),
    "pydantic-ai": ("pydantic_ai", '".[pydantic-ai]" in the checkout'),
    "loop": ("budgetguard_loop", '".[all]" in the checkout'),
    "openai": ("openai", "openai httpx"),
}
"""The package that an agent imports, and how it is installed."""


def quickstart(
    framework: Annotated[
        Framework, typer.Argument(help=f"One of {', '.join(get_args(Framework))}.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; else the terminal.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a bounded agent of 15 lines that runs without a key.

    Its model is scripted and asks for the same thing for ever: put yours in its place.

    Example: budgetguard quickstart langgraph -o agent.py

    Ends with 0, and with 2 when the file is there already, would hide a package, or cannot be
    written.
    """
    text = text_of(framework)
    needs, install = NEEDS[framework]
    if find_spec(needs) is None:
        message = f"this agent needs {needs}, not installed here: pip install {install}"
        typer.echo(f"budgetguard: {message}", err=True)
    written = {"framework": framework, "file": output, "text": text}
    if output is None:
        write_json(written) if as_json else typer.echo(text, nl=False)
        return
    if find_spec(output.stem) is not None:
        refuse(
            f"{printable(output.name)} would hide the package {output.stem!r} from the agent. "
            "Name it agent.py."
        )
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        refuse(f"{printable(str(output))}: {error.strerror}. Name a new file.")
    if as_json:
        write_json(written)
    typer.echo(f"Run it: python {printable(str(output))}", err=True)


def text_of(framework: str) -> str:
    """Return the agent of a framework, as it is written."""
    return files("budgetguard_cli").joinpath("quickstarts", f"{framework}.txt").read_text("utf-8")
