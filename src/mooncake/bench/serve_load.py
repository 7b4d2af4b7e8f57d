"""The load on something that serves: `mooncake bench serve-load`, and every step of `mooncake bench xpyd`."""

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from mooncake.bench.figures import StepFigures, measured
from mooncake.bench.load import Answered, Target, generate, models_of, one_by_one
from mooncake.bench.report import check_libraries, write_report
from mooncake.bench.workload import Workload
from mooncake.errors import ConfigError, MooncakeError


class LoadFailed(MooncakeError):
    """The server does not answer as it should.  The text is one sentence."""


def run(options: argparse.Namespace) -> int:
    """Returns 1 if any request failed."""
    if options.output:
        check_libraries()
    work = workload_of(options)
    target = Target(options.url.rstrip("/"), options.model or _only_model(options.url), options.request_timeout)
    step = run_load("load", target, work, options.warmup, _nothing, _nothing)
    print(step.text(), flush=True)
    if options.output:
        settings = {"url": target.url, "model": target.model, **settings_of(work)}
        for file in write_report(options.output, settings, [step]):
            print(f"wrote {file}")
    return 0 if step.passed else 1


def run_load(
    name: str, target: Target, work: Workload, warm_up: int, watch: Callable[[], object], begin: Callable[[], object]
) -> StepFigures:
    """Warm up, call `begin`, send everything, wait for all.  Raises LoadFailed if no warm-up request is answered
    well, and what `watch` raises."""
    answers = asyncio.run(_warm_up_then_measure(target, work, warm_up, watch, begin))
    return measured(name, answers)


def workload_of(options: argparse.Namespace) -> Workload:
    """Raises ConfigError."""
    if options.shared_prefix > options.input_len.low:
        raise ConfigError(
            f"--shared-prefix is {options.shared_prefix} tokens, but prompts may have only {options.input_len.low} "
            "(--input-len)."
        )
    return Workload(
        requests=options.requests,
        rate=options.rate,
        input_len=options.input_len,
        output_len=options.output_len,
        shared_prefix=options.shared_prefix,
        vocabulary=options.vocabulary,
        seed=options.seed,
    )


def settings_of(work: Workload) -> dict[str, Any]:
    """For the report."""
    return {
        "requests": work.requests,
        "rate (requests/s)": f"{work.rate:g}",
        "input tokens": str(work.input_len),
        "output tokens": str(work.output_len),
        "shared prefix (tokens)": work.shared_prefix,
        "vocabulary": work.vocabulary,
        "seed": work.seed,
    }


async def _warm_up_then_measure(
    target: Target, work: Workload, warm_up: int, watch: Callable[[], object], begin: Callable[[], object]
) -> list[Answered]:
    warm = await one_by_one(target, work.warm_up(warm_up), watch)
    if warm and all(answer.error for answer in warm):
        raise LoadFailed(f"{target.url} answers no request: {warm[-1].error}")
    planned = work.draw()
    begin()
    return await generate(target, planned, watch)


def _nothing() -> None:
    pass


def _only_model(url: str) -> str:
    try:
        models = asyncio.run(models_of(url.rstrip("/")))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise LoadFailed(f"{url} cannot be asked for its models ({reason}): give the address of a server.") from None
    if len(models) != 1:
        raise ConfigError(f"{url} has the models {', '.join(models) or '(none)'}: choose one with --model.")
    return models[0]
