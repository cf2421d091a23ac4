"""Metrics of teachers and of the terms of a loss."""

from forgeasync.observability.metric import Metric, Topic

_TAUGHT = "runs with `teachers`"

TEACHERS = Topic(
    heading="Teachers and terms of the loss",
    note="Gaps are log(policy / teacher) of the trained tokens that teachers were asked about, in nats, both "
    "over the full vocabulary at temperature 1; see [teachers.md](teachers.md).",
    metrics=(
        Metric(
            key="teacher/taught_share",
            meaning="Share of trained tokens that teachers were asked about. If it is 0 there are no means "
            "of what they said.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/gap_mean",
            meaning="Mean gap: estimates KL(policy || teacher) on tokens that the policy sampled.",
            when=_TAUGHT,
        ),
        Metric(key="teacher/gap_abs_mean", meaning="Mean absolute gap.", when=_TAUGHT),
        Metric(
            key="teacher/capped_share",
            meaning="Share of tokens whose gap was cut to `max_gap`.",
            when="losses with the term `sampled_reverse_kl`",
        ),
        Metric(
            key="teacher/<divergence>_kl",
            meaning="Mean divergence from the teacher over some likely tokens, such as "
            "`teacher/forward_kl`, in nats.",
            when="losses with the term `topk_kl`",
        ),
        Metric(
            key="teacher/student_mass",
            meaning="Mean probability that the policy gives to the ids that `topk_kl` looks at.",
            when="losses with the term `topk_kl`",
        ),
        Metric(
            key="teacher/<estimator>",
            meaning="Mean estimate, in nats, of the KL divergence from the teacher, such as `teacher/k3`.",
            when="losses with the term `ref_kl`",
        ),
        Metric(
            key="loss/cross_entropy",
            meaning="Mean of the term `cross_entropy` over all trained tokens, without its weight.",
            when="losses with this term",
        ),
        Metric(
            key="teacher/version",
            meaning="Version of the teacher's weights that a trained token was scored under, on average; 0 "
            "is what a teacher began with.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/served_version",
            meaning="Version that the teachers' engines have now; the oldest of several teachers.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/num_updates",
            meaning="Versions that teachers' engines have swapped in, added up over engines.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/num_rescored",
            meaning="Scores that a swap has cut, and that were computed anew under the new weights.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/num_without_sibling",
            meaning="Responses that teachers were not asked about, because `prompt` has `$sibling` and no "
            "other response of the group was correct and could be shown.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/num_without_feedback",
            meaning="Responses that teachers were not asked about, because `prompt` has `$feedback` and the "
            "reward said nothing about the response, or nothing that could be shown.",
            when=_TAUGHT,
        ),
        Metric(key="teacher/num_tokens", meaning="Response tokens that teachers have seen.", when=_TAUGHT),
        Metric(
            key="teacher/busy_s",
            meaning="Seconds that groups have been with teachers, added up over groups.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/num_retried",
            meaning="Attempts beyond a group's first: an engine was lost or late, or its answer was refused.",
            when=_TAUGHT,
        ),
        Metric(
            key="teacher/num_failed",
            meaning="Groups given up after `teachers.<name>.max_attempts` attempts; they count in "
            "`dropped/unscored`.",
            when=_TAUGHT,
        ),
    ),
)
