"""One frozen model of options per command: a notebook builds it, and the parser of the command line is built from it.

    class ProbeOptions(Options):
        train: Annotated[str, Shown("SOURCE")]
        "shards:PATTERN or folder:DIR"
        epochs: int = Field(90, ge=1)
        "how often the data are seen"

A field is the option of its name (or alias), and the string below it is the option's help. A field without a default is required;
a bool is a switch, and an optional one has a --no- form; a Literal has choices; a tuple takes one value or more, and an optional
one, or one without a name that has a default, takes none, too.
"""

import argparse
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from privacy.files.public import require_ledger
from trainer.config.cli import Parser
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Shown:
    """How the command line shows a field.

    Attributes:
        metavar: what stands for its value in the help; the name in capitals by default.
        is_positional: the field is an argument without a name.
        is_repeated: the option is given once per value of the tuple.
    """

    metavar: str | None = None
    is_positional: bool = False
    is_repeated: bool = False


class Options(BaseModel):
    """Options of a command, checked wherever they are built.

    Attributes:
        GROUP: heading in the help of the fields that the class itself adds.
        ONE_OF: names of optional fields of which exactly one must be given.

    Raises:
        ValidationError: an unknown option, or a value that is refused; on the command line a ConfigError of one line.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    GROUP: ClassVar[str | None] = None
    ONE_OF: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _gives_one_of(self) -> Self:
        if self.ONE_OF and sum(getattr(self, name) is not None for name in self.ONE_OF) != 1:
            flags = [f"--{type(self).model_fields[name].alias or name}" for name in self.ONE_OF]
            raise ValueError(f"give exactly one of {' and '.join(flags)}")
        return self


Chosen = TypeVar("Chosen", bound=Options)


def add_options(parser: argparse.ArgumentParser, model: type[Options]) -> None:
    """Adds the options of a model to a parser: those that it declares first, then those that it inherits."""
    parser.set_defaults(model_of_options=model)
    one_of = parser.add_mutually_exclusive_group(required=True) if model.ONE_OF else None
    added: set[str] = set()
    for owner in model.__mro__:
        names = [
            name
            for name in inspect.get_annotations(owner)
            if name in model.model_fields and name not in added
        ]
        group = vars(owner).get("GROUP")
        target = parser.add_argument_group(group) if names and group else parser
        for name in names:
            field = model.model_fields[name]
            shown = next((item for item in field.metadata if isinstance(item, Shown)), Shown())
            settings = _settings(field, shown)
            if not shown.is_positional:
                settings["required"] = field.is_required()
            flag = (field.alias or name) if shown.is_positional else f"--{field.alias or name}"
            (one_of if one_of and name in model.ONE_OF else target).add_argument(flag, **settings)
        added.update(names)


def _settings(field: FieldInfo, shown: Shown) -> dict[str, Any]:
    """The arguments of `add_argument` for a field; defaults stay in the model."""
    settings: dict[str, Any] = {
        "help": (field.description or "").replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    parts = get_args(field.annotation)
    is_optional = NoneType in parts
    kind = next(part for part in parts if part is not NoneType) if is_optional else field.annotation
    if kind is bool:
        return settings | {
            "action": argparse.BooleanOptionalAction if is_optional else "store_true"
        }
    settings["metavar"] = shown.metavar
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        may_be_empty = is_optional or (shown.is_positional and not field.is_required())
        settings |= (
            {"action": "append"} if shown.is_repeated else {"nargs": "*" if may_be_empty else "+"}
        )
    return settings | (
        {"choices": get_args(kind)} if get_origin(kind) is Literal else {"type": kind}
    )


def parse_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, intermixed: bool = False
) -> Options:
    """The options that a parser reads, as the model that `add_options` gave to it or to the chosen subcommand.

    Args:
        arguments: None is the command line of the process.
        intermixed: arguments without a name may stand before, between and behind options; not for subcommands.

    Raises:
        ConfigError: a bad argument, or a value that the model refuses; one line that names the option.
    """
    parsed = (parser.parse_intermixed_args if intermixed else parser.parse_args)(arguments)
    model: type[Options] = parsed.model_of_options
    names = {field.alias or name for name, field in model.model_fields.items()}
    try:
        return model.model_validate(
            {name: value for name, value in vars(parsed).items() if name in names}
        )
    except ValidationError as error:
        from privacy.plan.request import in_plain_words  # imports what no parser needs

        first = error.errors()[0]
        if "error" in first.get("ctx", {}):
            raise ConfigError(str(first["ctx"]["error"])) from error
        option = f"--{first['loc'][0]} " if first["loc"] else ""
        raise ConfigError(option + in_plain_words(first)) from error


def options_of(
    description: str | None,
    models: type[Chosen] | Mapping[str, type[Chosen]],
    arguments: Sequence[str] | None = None,
    *,
    intermixed: bool = False,
) -> Chosen:
    """The options of a whole command line, by one model or by that of the subcommand that it names; see `parse_options`.

    Args:
        description: of the command. That of a subcommand is its model's docstring.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if isinstance(models, Mapping):
        commands = parser.add_subparsers(required=True, metavar="/".join(models))
        for name, model in models.items():
            text = inspect.getdoc(model)
            add_options(commands.add_parser(name, help=text, description=text), model)
    else:
        add_options(parser, models)
    return cast(Chosen, parse_options(parser, arguments, intermixed=intermixed))


def require_folders(options: Options) -> None:
    """Looks whether the folders that a command reads are there, before it announces its work and imports torch.

    Raises:
        ConfigError: one is not there, or holds no run, or no checkpoint.
    """
    given = {name: path for name, path in vars(options).items() if isinstance(path, Path)}
    if "run_dir" in given:
        require_ledger(given["run_dir"])
    if "canaries" in given and not given["canaries"].is_dir():
        raise ConfigError(f"canaries folder {given['canaries']} does not exist")
    path = given.get("checkpoint")
    if (
        path is not None
        and not (path / "manifest.json").is_file()
        and not (path / "checkpoints").is_dir()
    ):
        raise ConfigError(
            f"{path} is neither a checkpoint nor a run folder with one; export.py --import makes one of exported weights"
        )
