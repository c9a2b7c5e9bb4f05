"""Builds the parser of a command from a frozen model of its options; a notebook builds the model.

    class ProbeOptions(Options):
        train: Annotated[str, Shown("SOURCE")]
        "shards:PATTERN or folder:DIR"
        epochs: int = Field(90, ge=1)
        "how often the data are seen"

A field is the option of its name (or alias), and the string below it is the option's help. A field
without a default is required; a bool is a switch, and an optional bool has a --no- form; a Literal
has choices; a tuple takes one value or more. An optional tuple takes no value too, and so does a
positional tuple that has a default.
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
    """The appearance of a field on the command line.

    Attributes:
        metavar: a word for its value in the help; the name in capitals by default.
        is_positional: the field is an argument without a name.
        is_repeated: the option is given once per value of the tuple.
    """

    metavar: str | None = None
    is_positional: bool = False
    is_repeated: bool = False


class Options(BaseModel):
    """The options of a command, checked wherever they are built.

    Attributes:
        GROUP: heading in the help of the fields that the class itself adds.
        ONE_OF: names of optional fields of which exactly one must be given.

    Raises:
        ValidationError: an unknown option, or a value that is refused; on the command line a
            ConfigError of one line.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    GROUP: ClassVar[str | None] = None
    ONE_OF: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _gives_one_of(self) -> Self:
        num_given = sum(getattr(self, name) is not None for name in self.ONE_OF)
        if self.ONE_OF and num_given != 1:
            fields = type(self).model_fields
            flags = [f"--{fields[name].alias or name}" for name in self.ONE_OF]
            raise ValueError(f"give exactly one of {' and '.join(flags)}")
        return self


OptionsType = TypeVar("OptionsType", bound=Options)


def add_options(parser: argparse.ArgumentParser, model: type[Options]) -> None:
    """Adds the options of a model to a parser: first the declared ones, then the inherited ones."""
    parser.set_defaults(model_of_options=model)
    one_of = parser.add_mutually_exclusive_group(required=True) if model.ONE_OF else None
    remaining = dict(model.model_fields)
    for owner in model.__mro__:
        names = [name for name in inspect.get_annotations(owner) if name in remaining]
        group = vars(owner).get("GROUP")
        target = parser.add_argument_group(group) if names and group else parser
        for name in names:
            field = remaining.pop(name)
            appearances = [entry for entry in field.metadata if isinstance(entry, Shown)]
            shown = appearances[0] if appearances else Shown()
            settings = _settings(field, shown)
            flag = field.alias or name
            if not shown.is_positional:
                flag = f"--{flag}"
                settings["required"] = field.is_required()
            if one_of is not None and name in model.ONE_OF:
                one_of.add_argument(flag, **settings)
            else:
                target.add_argument(flag, **settings)


def _settings(field: FieldInfo, shown: Shown) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a field; defaults stay in the model."""
    settings: dict[str, Any] = {
        "help": (field.description or "").replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    kind = field.annotation
    is_optional = NoneType in get_args(kind)
    if is_optional:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if kind is bool:
        settings["action"] = argparse.BooleanOptionalAction if is_optional else "store_true"
        return settings
    settings["metavar"] = shown.metavar
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        may_be_empty = is_optional or (shown.is_positional and not field.is_required())
        if shown.is_repeated:
            settings["action"] = "append"
        else:
            settings["nargs"] = "*" if may_be_empty else "+"
    if get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    else:
        settings["type"] = kind
    return settings


def parse_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, intermixed: bool = False
) -> Options:
    """Returns the options that a parser reads, as the model of the parser or of its subcommand.

    Args:
        arguments: None is the command line of the process.
        intermixed: allows positional arguments before, between and behind options; not for
            subcommands.

    Raises:
        ConfigError: a bad argument, or a value that the model refuses; one line that names the
            option.
    """
    parse = parser.parse_intermixed_args if intermixed else parser.parse_args
    namespace = parse(arguments)
    model: type[Options] = namespace.model_of_options
    names = {field.alias or name for name, field in model.model_fields.items()}
    settings = {name: setting for name, setting in vars(namespace).items() if name in names}
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        # Imported here, since it imports modules that no parser needs.
        from privacy.plan.request import in_plain_words

        first_error = error.errors()[0]
        if "error" in first_error.get("ctx", {}):
            raise ConfigError(str(first_error["ctx"]["error"])) from error
        option = f"--{first_error['loc'][0]} " if first_error["loc"] else ""
        raise ConfigError(option + in_plain_words(first_error)) from error


def options_of(
    description: str | None,
    models: type[OptionsType] | Mapping[str, type[OptionsType]],
    arguments: Sequence[str] | None = None,
    *,
    intermixed: bool = False,
) -> OptionsType:
    """Returns the options of a command line, by one model or by the model of its subcommand.

    See `parse_options`.

    Args:
        description: of the command; a subcommand is described by its model's docstring.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if isinstance(models, Mapping):
        commands = parser.add_subparsers(required=True, metavar="/".join(models))
        for name, model in models.items():
            text = inspect.getdoc(model)
            add_options(commands.add_parser(name, help=text, description=text), model)
    else:
        add_options(parser, models)
    return cast(OptionsType, parse_options(parser, arguments, intermixed=intermixed))


def require_folders(options: Options) -> None:
    """Refuses missing folders before a command announces its work and imports torch.

    Raises:
        ConfigError: a folder does not exist, or has no run, or no checkpoint.
    """
    paths = {name: path for name, path in vars(options).items() if isinstance(path, Path)}
    if "run_dir" in paths:
        require_ledger(paths["run_dir"])
    if "canaries" in paths and not paths["canaries"].is_dir():
        raise ConfigError(f"canaries folder {paths['canaries']} does not exist")
    path = paths.get("checkpoint")
    if path is None:
        return
    is_checkpoint = (path / "manifest.json").is_file()
    has_checkpoints = (path / "checkpoints").is_dir()
    if not is_checkpoint and not has_checkpoints:
        raise ConfigError(
            f"{path} is neither a checkpoint nor a run folder with one; export.py --import makes "
            "one of exported weights"
        )
