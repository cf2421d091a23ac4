"""Metrics of failures that a run survives."""

from forgeasync.faults import Role
from forgeasync.observability.metric import Metric, Topic


def _of_role(role: Role) -> tuple[Metric, Metric]:
    return (
        Metric(
            key=f"faults/detected_{role}",
            meaning=f"Failures of the role {role} that were noticed so far.",
        ),
        Metric(
            key=f"faults/recovered_{role}",
            meaning="Those after which the role has all that it had before.",
        ),
    )


FAULTS = Topic(
    heading="Failures",
    metrics=(
        *(metric for role in Role for metric in _of_role(role)),
        Metric(
            key="stall/num_found",
            meaning="How often the run stood still so far while all its processes answered, for far longer "
            "than ever before; `run.log` says what each loop waited for, and what each process did.",
        ),
        Metric(
            key="faults/storage_wait_s",
            meaning="Seconds so far that training waited for a disk that refused what the run writes.",
        ),
        Metric(
            key="faults/tokens_kept_share",
            meaning="Share of the tokens that lost generators had logged in flight from which others go on; "
            "1 where none was lost.",
        ),
        Metric(key="generator/num_healthy", meaning="Generators that may be given groups, spares included."),
        Metric(
            key="generator/num_suspect",
            meaning="Generators that have not answered for half of `generator.heartbeat_s`, or are slow "
            "beyond `generator.slow_factor`: they get no new groups for as long.",
        ),
        Metric(
            key="generator/num_starting",
            meaning="Generators that load their engine, or wait for the newest weights.",
        ),
        Metric(
            key="generator/num_lost",
            meaning="Generators that were lost so far, or did not come to sample.",
        ),
        Metric(key="generator/num_removed", meaning="Generators that were removed by `apps.control` so far."),
        Metric(
            key="generator/num_moved_groups",
            meaning="How often a group or a response lost its generator and went on with another.",
        ),
        Metric(
            key="generator/num_late_groups",
            meaning="How often a group or a response took longer than `timeouts.generate_s`.",
        ),
    ),
    note="`faults.jsonl` of the run names each failure.",
)
