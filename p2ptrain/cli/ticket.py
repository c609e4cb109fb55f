"""``p2ptrain ticket ...``: has a seed make, list, revoke and replace the tickets and codes with which machines join."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import JsonOption, SeedOption, YesOption, ask, confirm, is_text, not_empty, option
from p2ptrain.core.texts import check_one_of, human_seconds, human_time, printable, seconds_of
from wire.address import ROLES, join_command

if TYPE_CHECKING:
    from wire.records import TicketInfo

app = new_typer(help="Make, list, revoke and replace the tickets with which other machines join.")


@app.command("new")
def new(
    role: Annotated[str, option("--role ROLE", "worker, verifier, drafter or operator.")] = "worker",
    expires: Annotated[str, option("--expires TIME", "How long the ticket is valid: 30m, 12h, 7d.")] = "7d",
    uses: Annotated[int | None, option("--uses N", "Peers that may use it; default: any number.", min=1)] = None,
    host: Annotated[str, option("--host ADDRESS", "The seed's address for other machines.", callback=is_text)] = "",
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make a ticket and print it. Whoever has it can join. Peers that joined with it stay when it expires.

    \b
    Examples:
      p2ptrain ticket new
      p2ptrain ticket new --role operator --expires 1h --uses 1
      p2ptrain ticket new --host seed.example.org > ticket.txt
      p2ptrain ticket new --role verifier
      p2ptrain ticket new --role drafter --expires 1d
    """
    check_one_of("--role", role, ROLES)
    expires_s = seconds_of(expires, "--expires")
    _print_ticket(*ask(seed, lambda client: client.new_ticket(role, expires_s, uses, host)), as_json)


@app.command("code")
def code(
    role: Annotated[str, option("--role ROLE", "worker, verifier or drafter.")] = "worker",
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show six digits, which `p2ptrain join ADDRESS` asks for: one machine can join with them, within ten minutes.

    \b
    Examples:
      p2ptrain ticket code
      p2ptrain ticket code --role verifier
    """
    check_one_of("--role", role, [role for role in ROLES if role not in ("operator", "seed")])
    digits, expires_at = ask(seed, lambda client: client.new_code(role))
    if as_json:
        print_json({"code": digits, "role": role, "expires_at": expires_at})
        return
    typer.echo(printable(f"{digits[:3]} {digits[3:]}"))
    typer.echo(f"valid until {human_time(expires_at)} for one {role}, or to the first wrong guess", err=True)


@app.command("list")
def list_tickets(seed: SeedOption = "", as_json: JsonOption = False) -> None:
    """Show the tickets, without their secrets. If you lost one, make a new one.

    \b
    Examples:
      p2ptrain ticket list
      p2ptrain ticket list --json
    """
    tickets = ask(seed, lambda client: client.tickets())
    if as_json:
        print_json({"tickets": [item.to_map() for item in tickets]})
        return
    rows = [
        (
            item.id,
            item.role,
            item.state,
            item.kind or "-",
            f"{item.used} of {item.uses or 'any'}",
            _describe_expiry(item.expires_at, time.time()),
            item.host,
        )
        for item in tickets
    ]
    print_table(("ID", "FOR", "STATE", "KIND", "USED", "EXPIRES", "HOST"), rows, less=("KIND", "HOST"))


@app.command("revoke")
def revoke(
    ticket: Annotated[str, typer.Argument(metavar="ID", callback=not_empty, help="Id, or the beginning of it.")],
    seed: SeedOption = "",
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Revoke a ticket, and disconnect the peers that joined with it. They need another ticket.

    \b
    Examples:
      p2ptrain ticket revoke 3fa9
      p2ptrain ticket revoke 3fa9 --yes
    """
    confirm(f"Disconnect and lock out all peers that joined with ticket {ticket}?", seed, "tickets", ticket, yes=yes)
    revoked = ask(seed, lambda client: client.revoke_ticket(ticket))
    print_json({"ticket": revoked.to_map()}) if as_json else typer.echo(f"ticket {printable(revoked.id)} is revoked")


@app.command("rotate")
def rotate(seed: SeedOption = "", yes: YesOption = False, as_json: JsonOption = False) -> None:
    """Replace all tickets, and print the new one. The old ones let in no new peers; peers that joined with them stay.

    \b
    Examples:
      p2ptrain ticket rotate
      p2ptrain ticket rotate --yes
    """
    confirm("Replace all tickets?", yes=yes)
    _print_ticket(*ask(seed, lambda client: client.rotate_tickets()), as_json)


def _print_ticket(ticket: TicketInfo, text: str, as_json: bool) -> None:
    if as_json:
        print_json({"ticket": ticket.to_map(), "text": text})
        return
    typer.echo(printable(text))
    end = f" until {human_time(ticket.expires_at)}" if ticket.expires_at is not None else ""
    typer.echo(f"valid{end}; keep it secret. Use it as: {join_command('TICKET', ticket.role)}", err=True)


def _describe_expiry(expires_at: float | None, now: float) -> str:
    if expires_at is None:
        return "never"
    return f"in {human_seconds(expires_at - now)}" if expires_at > now else human_time(expires_at)
