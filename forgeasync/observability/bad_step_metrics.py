"""Definitions of the metrics on optimizer steps that were not made or were taken back."""

from forgeasync.observability.metric import Metric, Topic

BAD_STEPS = Topic(
    heading="Bad steps",
    metrics=(
        Metric(
            key="trainer/num_skipped_steps",
            meaning="Batches so far with an optimizer step that was not made or was taken back, because a "
            "loss, a gradient or the weights after it were not finite, or its gradient norm was a spike "
            "(`trainer.bad_steps`). The newest of these batches are kept in bad_steps/.",
        ),
        Metric(
            key="trainer/num_rolled_back_steps",
            meaning="Those of trainer/num_skipped_steps after which weights, moments and random states were "
            "set back to the batch's start.",
        ),
        Metric(
            key="trainer/num_unkept_batches",
            meaning="Those of trainer/num_skipped_steps of which bad_steps/ has not everything, because a "
            "disk has refused it.",
        ),
        Metric(
            key="grad_norm_limit",
            meaning="Gradient norm above which a step of the batch was a spike.",
            when="runs with `trainer.bad_steps.on_spike`, once `spike_window` steps were made",
        ),
    ),
)
