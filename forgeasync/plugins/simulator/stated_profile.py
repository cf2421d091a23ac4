"""Profile of hardware that is not available, computed from the model's shape and the manufacturer's data
sheet.

Nothing in it is measured. The time of a decode step is a roofline (Williams, Waterman, Patterson, "Roofline:
an insightful visual performance model", 2009): the longer of reading and computing, each at a share of the
speed in the data sheet.
"""

import math
from statistics import NormalDist

from forgeasync.config import ActivationCheckpointing, ModelFacts, RunConfig, longest_response, named_sources
from forgeasync.models import BYTES_PER_ELEMENT, kv_bytes_per_token
from forgeasync.planning import (
    DEVICE_BYTES_PER_S,
    KV_BLOCK_TOKENS,
    Machine,
    ParameterCounts,
    active_parameters,
    count_parameters,
    generator_parameters_per_rank,
    seconds_of,
    trainer_parameters_per_rank,
    weight_times,
)
from forgeasync.plugins.simulator.profile import (
    NUM_QUANTILES,
    DecodePoint,
    Distribution,
    Estimate,
    Lengths,
    Origin,
    Profile,
    TrainPoint,
    WeightTimes,
    powers_of_two,
)

CONTEXTS = (0, 1_024, 4_096, 16_384, 65_536)

OPTIMIZER_BYTES = 40
"""Per parameter: reads float32 parameter, gradient and two moments, writes three of them, casts a copy."""

SCORE_S, BETWEEN_S, START_S = 0.05, 0.5, 600.0
"""Assumed seconds of scoring a response, between two steps and of a start; in no data sheet."""

GPU = "H100 SXM 80 GB"
FLOPS_PER_S = 989e12
"""Dense FLOP/s in the compute dtype."""

DECODE_EFFICIENCY = 0.7
"""Share of the bandwidth that a decode step reaches."""

PREFILL_EFFICIENCY = 0.4
"""Share of the FLOP/s that a prefill reaches."""

TRAIN_EFFICIENCY = 0.25
"""Share of the FLOP/s that training reaches, with communication: model FLOPs utilization (Chowdhery et al.,
"PaLM", 2022, appendix B), with recomputed activations counted as work."""

STEP_OVERHEAD_S = 0.003
"""Seconds of a decode step outside of reading and computing."""

SOURCE = (
    "NVIDIA H100 data sheet: 989 TFLOP/s in bfloat16 without sparsity, 3.35 TB/s; efficiencies (decode 70 % "
    "of the bandwidth, prefill 40 % and training 25 % of the FLOP/s) and 3 ms a decode step are assumed"
)


def stated_profile(config: RunConfig, facts: ModelFacts, *, mean_response_tokens: float) -> Profile:
    """Return the profile of a checked config on H100s, which were not measured.

    Lengths of responses are lognormal with this mean, truncated at the longest response that the config
    allows.

    Raises:
        ValueError: the mean is less than 1 or more than the longest response.
    """
    if not 1.0 <= mean_response_tokens <= longest_response(config):
        raise ValueError(
            f"mean_response_tokens = {mean_response_tokens:g} must be from 1 to {longest_response(config)}, "
            "the longest response of the config"
        )
    counts = count_parameters(facts)
    terms = weight_times(config, facts)
    prefill = config.generator.tensor_parallel * FLOPS_PER_S * PREFILL_EFFICIENCY
    prefill /= 2 * active_parameters(facts, counts)
    lengths = _lengths(mean_response_tokens, longest_response(config))
    prompt = Distribution.point(
        float(max(1, min(256, config.model.max_context_length - longest_response(config))))
    )
    return Profile(
        origin=Origin.STATED,
        sources=(SOURCE, "bandwidths of weights: forgeasync/planning/weight_times.py"),
        hardware=GPU,
        model=config.model.path,
        kv_block_tokens=KV_BLOCK_TOKENS[Machine.GPU],
        decode=_decode(config, facts, counts),
        prefill_tokens_per_s=Estimate.stated(prefill),
        train=_train(config, facts, counts),
        between_steps_s=Distribution.point(BETWEEN_S),
        weights=WeightTimes(
            wait_s=Distribution.point(0.0),
            publish_s=Distribution.point(seconds_of("publish", terms)),
            fetch_s=Distribution.point(seconds_of("fetch", terms) + seconds_of("stage", terms)),
            swap_s=Distribution.point(seconds_of(f"pause, shadow: {config.weights.shadow}", terms)),
        ),
        score_s=Distribution.point(SCORE_S),
        score_places=config.scorer.num_workers,
        lengths={
            source.name: Lengths(prompt=prompt, response=lengths, prompt_share=0.5)
            for source in named_sources(config.data)
        },
        start_s=Estimate.stated(START_S),
    )


def _decode(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> tuple[DecodePoint, ...]:
    generator = config.generator
    per_rank = generator_parameters_per_rank(config, facts, counts)
    element, tensor = BYTES_PER_ELEMENT[generator.dtype], generator.tensor_parallel
    of_experts = per_rank * counts.experts / counts.total
    points = []
    for running in powers_of_two(generator.max_num_seqs):
        # Share of experts that at least one token is routed to, if the router has no preference.
        touched = 1.0
        if facts.num_experts:
            touched = 1.0 - (1.0 - facts.top_k / facts.num_experts) ** running
        weights = (per_rank - of_experts * (1.0 - touched)) * element
        compute_s = 2 * active_parameters(facts, counts) * running / tensor
        compute_s /= FLOPS_PER_S * PREFILL_EFFICIENCY
        for context in CONTEXTS:
            read = weights + running * context * kv_bytes_per_token(config, facts)
            read_s = read / (DEVICE_BYTES_PER_S * DECODE_EFFICIENCY)
            points.append(
                DecodePoint(
                    num_running=running,
                    num_context_tokens=context,
                    step_s=Estimate.stated(STEP_OVERHEAD_S + max(read_s, compute_s)),
                )
            )
    return tuple(points)


def _train(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> tuple[TrainPoint, ...]:
    """Return optimizer steps of several costs.

    The forward pass needs 2 FLOPs for each parameter that a token uses, and for attention as many as
    ``planning.pair_cost`` says. The backward pass needs twice as many, and recomputing activations needs
    another forward pass. The processes of a data rank share its rows.
    """
    trainer = config.trainer
    passes = 4 if trainer.activation_checkpointing is ActivationCheckpointing.FULL else 3
    flops_per_s = trainer.parallel.tensor * trainer.parallel.context * FLOPS_PER_S * TRAIN_EFFICIENCY
    token_s = passes * 2 * active_parameters(facts, counts) / flops_per_s
    optimizer_s = OPTIMIZER_BYTES * trainer_parameters_per_rank(config, counts) / DEVICE_BYTES_PER_S
    return tuple(
        TrainPoint(
            num_rows=num_rows,
            cost=num_rows * trainer.tokens_per_row,
            step_s=Estimate.stated(optimizer_s + num_rows * trainer.tokens_per_row * token_s),
        )
        for num_rows in (1, 2, 8)
    )


def _lengths(mean: float, longest: int) -> Distribution:
    """Return a lognormal distribution with sigma 0.8 that has this mean after the truncation at ``longest``.

    A mean close to ``longest`` cannot be reached; the distribution then comes as close as possible.
    """
    normal = [NormalDist().inv_cdf((index + 0.5) / NUM_QUANTILES) for index in range(NUM_QUANTILES)]

    def cut(median: float) -> list[float]:
        return [min(float(longest), max(1.0, median * math.exp(0.8 * z))) for z in normal]

    low, high = 1.0, float(longest) * 100.0
    for _ in range(60):
        median = math.sqrt(low * high)
        low, high = (median, high) if sum(cut(median)) / NUM_QUANTILES < mean else (low, median)
    quantiles = cut(high)
    return Distribution(
        mean=Estimate.stated(min(quantiles[-1], sum(quantiles) / NUM_QUANTILES)), quantiles=tuple(quantiles)
    )
