"""Metrics of what is learned: rewards, responses, policy, loss, replay."""

from forgeasync.observability.metric import Metric, Reporter, Topic

_EVALUATED = "steps with an evaluation, or during which one beside training ended"
_SCORED = "steps during which groups were scored"
_EXPERTS = "models with experts"
_PROBED = "`trainer.replay_probe_share` above 0"
_COMPOSITION = "steps after some group has trained"
_CORRECTED = "runs with `algorithm.corrections`"


def _evaluation(prefix: str, problems: str) -> tuple[Metric, ...]:
    return (
        Metric(
            key=f"{prefix}/accuracy",
            meaning=f"Share of the scored responses to {problems} that are correct.",
            when=_EVALUATED,
        ),
        Metric(
            key=f"{prefix}/score_mean",
            meaning=f"Mean score of the scored responses to {problems}, partial credit included.",
            when=_EVALUATED,
        ),
        Metric(
            key=f"{prefix}/num_unscored",
            meaning=f"Responses to {problems} that could not be scored. They are left out of accuracy and "
            "mean score; where none was scored, neither is there.",
            when=_EVALUATED,
        ),
        Metric(
            key=f"{prefix}/version_min",
            meaning=f"Oldest policy version that sampled a response to {problems}. With `evaluation.mode: "
            "pinned` it is the newest, too.",
            when=_EVALUATED,
        ),
        Metric(
            key=f"{prefix}/version_max",
            meaning=f"Newest policy version that sampled a response to {problems}.",
            when=_EVALUATED,
        ),
        Metric(
            key=f"{prefix}/reward/<part>",
            meaning=f"Mean of a part of the scores of {problems}, by the part's name.",
            when=_EVALUATED,
        ),
    )


PROGRESS = Topic(
    heading="Progress",
    metrics=(
        Metric(
            key="step",
            meaning="Batches trained on so far; 0 only on the line of the evaluation before training.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="policy_version",
            meaning="Version of the weights that this step made.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="trainer/num_optimizer_steps",
            meaning="Optimizer steps made on the batch (`trainer.steps_per_batch`). Where there are several, "
            "the trainer's metrics are means over them.",
        ),
        Metric(
            key="trainer/num_steps_made_again",
            meaning="Complete steps so far that were made again, from the same rollouts: a trainer that was "
            "started again had no snapshot of them.",
        ),
        Metric(
            key="trainer/num_padding_tokens",
            meaning="Padding tokens in the packed rows of the batch, over all data-parallel ranks.",
        ),
        Metric(
            key="learning_rate", meaning="Learning rate of the batch's optimizer steps, after the schedule."
        ),
    ),
)

REWARDS = Topic(
    heading="Rewards",
    metrics=(
        Metric(
            key="reward/mean",
            meaning="Mean reward of the batch's rollouts, after filters.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="reward/std",
            meaning="Population standard deviation of the rewards of the batch's rollouts.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="reward/<part>",
            meaning="Mean of a part of the scores, by the part's name, over the batch's rollouts whose "
            "reward reports it; see [rewards.md](rewards.md).",
            when="rewards with parts",
        ),
        Metric(
            key="score/<part>",
            meaning="Mean of a part of the scores, by the part's name, over all rollouts scored during the "
            "step, before filters.",
            when="rewards with parts, steps during which groups were scored",
        ),
        Metric(
            key="reward/scored_mean",
            meaning="Mean reward of all rollouts scored during the step, before filters.",
            when=_SCORED,
        ),
        Metric(
            key="group/all_correct_share",
            meaning="Share of the groups scored during the step all of whose responses are correct. Such a "
            "group gives no group-relative advantage.",
            when=_SCORED,
        ),
        Metric(
            key="group/all_wrong_share",
            meaning="Share of the groups scored during the step none of whose responses is correct. Such a "
            "group gives no group-relative advantage either, unless its rewards differ.",
            when=_SCORED,
        ),
    ),
)

EVALUATION = Topic(
    heading="Evaluation",
    note="A set of `evaluation.sets` has the same metrics under its name, over its `num_samples` responses "
    "to each problem.",
    metrics=(
        *_evaluation("eval", "the held-out problems"),
        Metric(
            key="eval/wall_s",
            meaning="Seconds from the beginning to the end of the evaluation of held-out problems and all "
            "sets. `time/eval_s` has the part for which training waited.",
            when=_EVALUATED,
        ),
        Metric(
            key="eval/num_skipped",
            meaning="Evaluations so far that were due and left out: another one was under way, or the last "
            "one was one step ahead.",
            when="runs with `evaluation.mode: beside`",
        ),
        *_evaluation("eval/<set>", "the set's problems"),
    ),
)

RESPONSES = Topic(
    heading="Responses",
    note="Lengths count sampled tokens, over all turns of an episode.",
    metrics=(
        Metric(
            key="response/length_mean",
            meaning="Mean length of the batch's responses, in tokens.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="response/length_min",
            meaning="Length of the batch's shortest response, in tokens.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="response/length_max",
            meaning="Length of the batch's longest response, in tokens.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="response/truncated_share",
            meaning="Share of the batch's responses that were cut at `sampling.max_response_tokens`; with an "
            "environment, of the episodes whose last turn was cut or whose context was full.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="response/length_mean_correct",
            meaning="Mean length of the correct responses scored during the step, in tokens.",
            when="steps during which a correct response was scored",
        ),
        Metric(
            key="response/length_mean_wrong",
            meaning="Mean length of the wrong responses scored during the step, in tokens.",
            when="steps during which a wrong response was scored",
        ),
        Metric(
            key="response/no_answer_share",
            meaning="Share of the responses scored during the step that state no answer; 0 where the reward "
            "does not say.",
            when=_SCORED,
        ),
    ),
)

LOSS = Topic(
    heading="Policy and loss",
    note="Means are over the batch's trained tokens.",
    metrics=(
        Metric(key="loss", meaning="Loss of the batch, before the step.", required_of=Reporter.TRAINER),
        Metric(
            key="grad_norm",
            meaning="Norm of the whole gradient, before clipping.",
            required_of=Reporter.TRAINER,
        ),
        Metric(
            key="policy/entropy",
            meaning="Mean entropy, in nats, of the distribution that a token is trained under: at the "
            "sampling temperature, over the tokens that top-k, top-p and min-p kept. It is exact, and falls "
            "as the policy becomes sure of its answers.",
        ),
        Metric(
            key="objective/<name>",
            meaning="Mean of what the objective counts, such as `objective/clipped_share`: the share of "
            "tokens whose gradient is clipped. An objective of your own chooses its names.",
            when="objectives that count something",
        ),
        Metric(
            key="kl/<estimator>",
            meaning="Mean estimate, in nats, of the KL divergence between the policy and the model that the "
            "run started from.",
            when="runs with `algorithm.kl`",
        ),
        Metric(
            key="correction/weight_mean",
            meaning="Mean of the product of all corrections' weights.",
            when=_CORRECTED,
        ),
        Metric(
            key="correction/weight_max",
            meaning="Largest product of all corrections' weights.",
            when=_CORRECTED,
        ),
        Metric(
            key="correction/effective_sample_share",
            meaning="What the batch is worth after corrections: (sum w)^2 / (n * sum w^2) of the weights.",
            when=_CORRECTED,
        ),
        Metric(
            key="correction/<name>",
            meaning="Mean of what a correction counts, such as `correction/truncated_share`: the share of "
            "tokens whose weight it has cut.",
            when=_CORRECTED,
        ),
    ),
)

OFF_POLICY = Topic(
    heading="Age of the data",
    note="A token's age is the number of versions between the weights that sampled it and the weights that "
    "it was trained on (`policy_version` - 1); see [off_policy.md](off_policy.md).",
    metrics=(
        Metric(
            key="off_policy/age_mean",
            meaning="Mean age of the batch's tokens, in versions.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="off_policy/age_max",
            meaning="Age of the batch's oldest token, in versions.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="off_policy/effective_sample_share",
            meaning="What the batch is worth under the current policy: (sum w)^2 / (n * sum w^2) of the "
            "tokens' probability ratios w, current to behavior.",
        ),
        Metric(
            key="off_policy/rejected_token_share",
            meaning="Share of the batch's response tokens that were too old to be trained on.",
            when="runs that limit the age of tokens",
        ),
        Metric(
            key="accounting/length_distance",
            meaning="Total variation distance between the lengths of rollouts as submitted and as "
            "effectively trained, by powers of two, over the last `accounting.metric_groups` groups.",
            when=_COMPOSITION,
        ),
        Metric(
            key="accounting/source_distance",
            meaning="Total variation distance between the sources of rollouts as submitted and as "
            "effectively trained, over the last `accounting.metric_groups` groups.",
            when=_COMPOSITION,
        ),
        Metric(
            key="accounting/mean_length_ratio",
            meaning="Mean length of rollouts as trained, divided by the mean length as submitted.",
            when=_COMPOSITION,
        ),
        Metric(
            key="accounting/length_share_ratio_<n>",
            meaning="Share of the rollouts of n to 2n - 1 tokens as trained, divided by that as submitted.",
            when=_COMPOSITION,
        ),
        Metric(
            key="accounting/effective_groups_share",
            meaning="Sum of the trained groups' weights, divided by the number of submitted groups.",
            when=_COMPOSITION,
        ),
        Metric(
            key="accounting/outstanding_deficit",
            meaning="Weight of lost groups that no other group has taken over yet.",
        ),
        Metric(
            key="accounting/num_censored",
            meaning="Groups so far that were lost before their lengths were known.",
        ),
        Metric(key="accounting/weight_max", meaning="Largest weight of the batch's groups."),
    ),
)

MISMATCH = Topic(
    heading="Trainer against generator",
    note="Differences are between the trainer's log-probability of a token and the generator's, in nats, "
    "over trained tokens.",
    metrics=(
        Metric(
            key="mismatch/logprob_abs_mean",
            meaning="Mean absolute difference, in nats.",
            required_of=Reporter.TRAINER,
        ),
        Metric(
            key="mismatch/logprob_abs_max",
            meaning="Largest absolute difference, in nats.",
            required_of=Reporter.TRAINER,
        ),
        Metric(
            key="mismatch/kl",
            meaning="Mean estimate (k3) of the KL divergence between generator and trainer, in nats; a "
            "difference counts up to 20.",
            required_of=Reporter.TRAINER,
        ),
        Metric(
            key="mismatch/fresh_logprob_abs_mean",
            meaning="Mean absolute difference, in nats, over responses that are wholly of age 0: numerics "
            "alone.",
            when="steps with such a response",
        ),
        Metric(
            key="mismatch/with_replay_logprob_abs_mean",
            meaning="Mean absolute difference, in nats, on the probed rows as trained.",
            when=_PROBED,
        ),
        Metric(
            key="mismatch/with_replay_kl",
            meaning="Mean estimate (k3) of the KL divergence, in nats, on the probed rows as trained.",
            when=_PROBED,
        ),
        Metric(
            key="mismatch/without_replay_logprob_abs_mean",
            meaning="Mean absolute difference, in nats, on the probed rows without replay of routed experts.",
            when=_PROBED,
        ),
        Metric(
            key="mismatch/without_replay_kl",
            meaning="Mean estimate (k3) of the KL divergence, in nats, on the probed rows without replay of "
            "routed experts.",
            when=_PROBED,
        ),
    ),
)

ROUTING = Topic(
    heading="Replay of routed experts",
    note="See [replay.md](replay.md).",
    metrics=(
        Metric(
            key="routing/num_moe_layers",
            meaning="Always 0: the model has no experts, and this is its only metric of routing.",
            when="models without experts",
        ),
        Metric(
            key="routing/recorded_share",
            meaning="Share of the tokens that any output depends on whose routed experts were recorded.",
            when=_EXPERTS,
        ),
        Metric(
            key="routing/num_without_record",
            meaning="Tokens without a record: the trainer's own gate has routed them.",
            when=_EXPERTS,
        ),
        Metric(
            key="routing/disagreement_share",
            meaning="Share of the replayed decisions (a token in a layer) in which the trainer's own gate "
            "would have chosen another set of experts.",
            when=_EXPERTS,
        ),
        Metric(
            key="routing/disagreement_share_layer_<i>",
            meaning="Share of one layer's replayed decisions in which the trainer's own gate would have "
            "chosen another set of experts.",
            when=_EXPERTS,
        ),
    ),
)

TRAINING_TOPICS = (PROGRESS, REWARDS, EVALUATION, RESPONSES, LOSS, OFF_POLICY, MISMATCH, ROUTING)
