"""`canter check`: what there is to say about an environment and settings before training."""

from __future__ import annotations

import sys
from collections import Counter

from canter.cli.parser import Parser, add_config_flags, config_overrides
from canter.cli.preflight import look, show
from canter.cli.train import EPILOG, SHORT_FLAGS, check_device, merged_config
from canter.preflight.plan import counted


def check_command(argv: list[str]) -> None:
    """Look at an environment and the settings for it before training."""
    arguments = check_parser(argv).parse(argv)
    config, source = merged_config(
        config_overrides(arguments), env_id=arguments.env, preset=arguments.preset, file=arguments.config
    )
    check_device(config.device)
    print(f"{config.env.id} with {source}")
    findings = look(config)
    show(findings)
    count = Counter(finding.level for finding in findings)
    verdict = "This cannot work" if count["error"] else "Ready to train"
    print(
        f"{verdict}: {counted(count['error'], 'error')}, {counted(count['warning'], 'warning')}, "
        f"{counted(count['note'], 'note')}"
    )
    if count["error"]:
        sys.exit(1)


def check_parser(argv: list[str]) -> Parser:
    """The flags of `canter check`: those of `canter train` that say what to train."""
    parser = Parser(
        "check",
        usage="[ENV] [--preset NAME] [--config FILE] [--KEY VALUE ...]",
        description=(
            "Look at an environment and the settings for it before training: spaces, endings, rewards and seeds in a\n"
            "few random steps, and the arithmetic of the run. The exit code is 1 if something cannot work."
        ),
        epilog=EPILOG,
    )
    parser.add_argument("env", metavar="ENV", nargs="?", help="environment id; by default CartPole-v1")
    parser.flag("--preset", metavar="NAME", help="begin with these settings instead of the environment's")
    parser.flag("--config", metavar="FILE", help="YAML file of settings, all or some")
    add_config_flags(parser, argv, SHORT_FLAGS)
    return parser
