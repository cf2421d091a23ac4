"""Metrics of how a run runs: times, load, failures, payloads, weights, memory."""

from forgeasync.observability.metric import Metric, Reporter, Topic

TIMES = Topic(
    heading="Time and throughput",
    metrics=(
        Metric(
            key="time/elapsed_s",
            meaning="Seconds since the first training step started, with everything that happened since.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="time/step_s",
            meaning="Seconds that the whole step took, evaluation included.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="time/wait_for_batch_s",
            meaning="Seconds that the trainer stood idle for the batch.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="time/train_s",
            meaning="Seconds of forward pass, backward pass and optimizer, reading payloads included.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="time/read_payloads_s",
            meaning="Seconds, as part of `time/train_s`, that the first trainer rank took to read and pack "
            "the batch's arrays.",
        ),
        Metric(
            key="time/publish_weights_s",
            meaning="Seconds that training waited to publish the new weights: until the version before was "
            "staged, the weights were checked and their copies had begun. The rest of publishing goes on "
            "beside the next step.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="time/wait_for_copies_s",
            meaning="Seconds, as part of `time/train_s`, that the optimizer of the first trainer rank waited "
            "until copies of the weights before (published, for a checkpoint or for a snapshot) were made. "
            "Copies of "
            "published weights from a GPU are not counted: the GPU waits for them, not the rank.",
        ),
        Metric(
            key="time/eval_s",
            meaning="Seconds that training waited for an evaluation; 0 on steps where it did not.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="time/controller_s",
            meaning="Seconds since the line before that the controller took: packing rows, committing the "
            "batch, reports of other processes, writing the line.",
        ),
        Metric(
            key="time/wait_for_disk_s",
            meaning="Seconds since the line before that training waited until the ledger and the lines of "
            "the step were on the disk.",
        ),
        Metric(
            key="time/checkpoint_s",
            meaning="Seconds that training stood still until the checkpoint of the step before was begun, "
            "without what it waited for a disk that refused.",
            when="steps after a checkpoint",
        ),
        Metric(
            key="throughput/train_tokens_per_s",
            meaning="Response tokens trained on, per second of `time/step_s`.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="throughput/generated_tokens_per_s",
            meaning="Response tokens generated during the step, per second of `time/step_s`.",
            required_of=Reporter.LOOP,
        ),
        Metric(
            key="generator/busy_s",
            meaning="Seconds so far with at least one request in flight, summed over the generators.",
        ),
        Metric(
            key="generator/num_log_failures",
            meaning="How often so far a generator could not log its tokens in flight, for lack of shared "
            "memory. Its death would then have lost those of the groups that were open.",
        ),
    ),
)

LOAD = Topic(
    heading="Load and the replay buffer",
    metrics=(
        Metric(key="load/bound", meaning="Most groups that may be under way now."),
        Metric(
            key="load/trainer_wait_share",
            meaning="Share of `time/step_s` that the trainer waited for the batch.",
        ),
        Metric(key="load/trainer_waits", meaning="1 where the trainer waits for the generators, else 0."),
        Metric(key="load/generators_wait", meaning="1 where the generators wait for the trainer, else 0."),
        Metric(key="buffer/num_in_flight", meaning="Groups that are being sampled or scored."),
        Metric(key="buffer/num_complete", meaning="Groups that wait for training."),
        Metric(key="buffer/num_reissued", meaning="Prompts so far that came again for a lost group."),
        Metric(
            key="buffer/num_restarted",
            meaning="Prompts so far whose groups were under way at a checkpoint from which the run was "
            "resumed.",
        ),
        Metric(
            key="buffer/num_restored",
            meaning="Finished groups that came back from the disk when the run was resumed last, instead of "
            "being sampled again.",
        ),
        Metric(
            key="buffer/num_left_out_groups",
            meaning="Finished groups on the disk that were sampled again when the run was resumed last: "
            "torn, too old, of another config, or of weights that were lost.",
        ),
        Metric(
            key="buffer/num_kept_groups",
            meaning="Finished groups that are on the disk now, for a run that is resumed.",
        ),
        Metric(
            key="buffer/num_unkept_groups",
            meaning="Finished groups so far that could not be written to the disk. A resumed run would "
            "sample them again.",
        ),
        Metric(
            key="buffer/kept_behind_s",
            meaning="Longest time since the step before from the end of a group's scoring until it was on "
            "the disk, or refused.",
        ),
        Metric(
            key="dropped/<reason>",
            meaning="Groups lost in the step, by reason (`DropReason` in forgeasync/buffer/prompts.py).",
            when="every step, for each reason",
        ),
        Metric(
            key="filtered/num_groups_<reason>",
            meaning="Groups so far that filters dropped, by reason (`FilterReason` in "
            "forgeasync/algorithms/group_facts.py).",
            when="every step, for each reason",
        ),
        Metric(
            key="filtered/num_rollouts",
            meaning="Rollouts so far that filters left out, those of dropped groups too.",
        ),
        Metric(
            key="ledger/num_events",
            meaning="Lines of `ledger.jsonl` so far, all of them on the disk, those of earlier starts too.",
        ),
        Metric(
            key="ledger/behind_s",
            meaning="Longest time since the step before from an event until its line was on the disk.",
        ),
    ),
)

SCORING = Topic(
    heading="Scoring",
    metrics=(
        Metric(
            key="scoring/num_timeouts",
            meaning="Answers so far that scored 0 since they were not verified in `scorer.answer_limit_s`.",
        ),
        Metric(
            key="scoring/num_crashes",
            meaning="Answers so far that scored 0 since the process that verified them died.",
        ),
        Metric(
            key="scoring/num_errors",
            meaning="Answers so far that scored 0 since their verifier raised an exception or gave no finite "
            "number from -1 to 1.",
        ),
        Metric(
            key="scoring/num_oversized",
            meaning="Responses so far that scored 0 since they are longer than what a verifier, judge or "
            "process reward model is given.",
        ),
        Metric(
            key="scoring/num_killed_rewards",
            meaning="Processes of a user's own rewards and of process reward models so far that were killed "
            "because a call did not end.",
        ),
        Metric(key="scoring/num_judge_requests", meaning="Requests to judges so far."),
        Metric(
            key="scoring/num_judge_cached",
            meaning="Responses so far whose verdicts a judge had given before, for the same content.",
        ),
        Metric(
            key="scoring/num_judge_malformed",
            meaning="Replies of judges so far that were no verdicts; they are asked for again.",
        ),
        Metric(
            key="scoring/num_judge_down",
            meaning="Requests to judges so far that had no answer in time, or status 429 or 5xx.",
        ),
        Metric(
            key="scoring/num_failed_attempts",
            meaning="Failed attempts so far to score a response, or a group whose responses are compared; "
            "each has `scorer.max_attempts`.",
        ),
        Metric(
            key="scoring/num_lost_calls",
            meaning="Calls so far that ended with a scorer's process; they are made again, and are no "
            "attempts.",
        ),
        Metric(
            key="score/num_retried",
            meaning="Calls so far that had scored nothing and were followed by another one for the same "
            "response: after a failure, a lost scorer, or a wait for what scores.",
        ),
        Metric(
            key="score/num_failed",
            meaning="Responses so far that were given up without a score. They cost their groups "
            "(`dropped/unscored`), and are never scored 0.",
        ),
        Metric(
            key="score/num_deferred",
            meaning="Calls so far that found that what scores is not available, such as a judge's server "
            "that is down; they are no attempts.",
        ),
        Metric(
            key="score/num_discarded",
            meaning="Answers so far that did not count: another scorer had been given the response.",
        ),
        Metric(key="score/num_queued", meaning="Responses that wait for a scorer."),
        Metric(key="score/num_in_flight", meaning="Responses that are with a scorer."),
        Metric(
            key="score/num_early",
            meaning="Responses so far whose scoring began while others of their group were still sampled.",
        ),
    ),
)

WEIGHTS = Topic(
    heading="Weights on their way to the generators",
    note="Counted over all generators during the step, unless a row says otherwise; see "
    "[weights.md](weights.md).",
    metrics=(
        Metric(
            key="generator/max_pause_s",
            meaning="Longest time, in seconds, that a generator stood still for a swap of weights.",
        ),
        Metric(
            key="generator/max_swap_wait_s",
            meaning="Longest wait before a swap, in seconds: draining, or standing still for the fetch.",
        ),
        Metric(
            key="generator/num_crossing",
            meaning="Sequences that a swap found under way and that went on where they were.",
        ),
        Metric(
            key="generator/num_resumed",
            meaning="Sequences that a swap ended and that began again with what they had as prefix.",
        ),
        Metric(key="generator/num_recomputed", meaning="Sequences that lost their KV cache to a swap."),
        Metric(key="weights/num_swaps", meaning="Swaps of weights."),
        Metric(
            key="weights/max_publish_s",
            meaning="Longest publishing of a version, in seconds: from when its turn came until generators "
            "could fetch it. Training waits only for `time/publish_weights_s` of it.",
        ),
        Metric(
            key="weights/max_fetch_s",
            meaning="Longest fetch of a version, in seconds; generators decode meanwhile.",
        ),
        Metric(key="weights/num_bytes_moved", meaning="Bytes that the fetches moved."),
        Metric(key="weights/num_bytes_needed", meaning="Bytes of the fetches that the engines use."),
        Metric(
            key="weights/num_bad_blocks",
            meaning="Blocks that arrived with another checksum than the manifest's.",
        ),
        Metric(
            key="weights/num_skipped_versions",
            meaning="Versions so far that were not published when they were made, because both staging "
            "buffers were being read.",
        ),
        Metric(
            key="weights/num_expired_leases",
            meaning="Generators so far that took longer than `weights.lease_timeout_s` to read a version.",
        ),
    ),
)

PAYLOADS = Topic(
    heading="Payloads",
    note="The arrays of the rollouts (tokens, log-probabilities, routed experts, kept tokens) in shared "
    "memory.",
    metrics=(
        Metric(key="payload/num_bytes_held", meaning="Bytes in the payload store at the end of the step."),
        Metric(
            key="payload/num_bytes_reserved",
            meaning="Bytes reserved for groups under way at the end of the step.",
        ),
        Metric(
            key="payload/bytes_per_token",
            meaning="Bytes of the batch's payloads for each of its tokens, prompts and responses alike.",
        ),
        Metric(
            key="payload/num_read_shared",
            meaning="Payloads that the first trainer rank read from its own host's shared memory.",
        ),
        Metric(
            key="payload/num_read_disk",
            meaning="Payloads of restored groups that the first trainer rank read from the run's folder.",
        ),
        Metric(
            key="payload/num_read_remote",
            meaning="Payloads that the first trainer rank read from other hosts.",
        ),
        Metric(
            key="payload/num_waits",
            meaning="Groups so far that had to wait for room in the payload store.",
        ),
    ),
)

MEMORY = Topic(
    heading="Memory",
    note="Resident memory is the peak resident set so far of the role's largest single process. It is read "
    "from the kernel once a step and includes the pages of shared memory that the process has touched. "
    "Processes that an actor has started belong to its role: workers of an engine, of verifiers, of rewards. "
    "GPU memory is the most that PyTorch's allocator has reserved so far in one process of the role.",
    metrics=(
        Metric(
            key="memory/controller_gib",
            meaning="GiB of the process that runs the loops; processes that it has started belong to their "
            "own roles.",
        ),
        Metric(key="memory/trainer_gib", meaning="GiB of the largest process of the trainer's ranks."),
        Metric(key="memory/generator_gib", meaning="GiB of the largest process of the generators."),
        Metric(
            key="memory/scorer_gib",
            meaning="GiB of the largest process of the scorer.",
            when="steps once the scorer has scored something; an environment scores by itself",
        ),
        Metric(
            key="memory/trainer_gpu_gib",
            meaning="GiB reserved on the GPU of the trainer rank with the most.",
            when="trainers with a GPU",
        ),
        Metric(
            key="memory/generator_gpu_gib",
            meaning="GiB reserved on the GPU by the actor's process of the generator with the most; vLLM's "
            "further workers (`generator.tensor_parallel` above 1) are not counted.",
            when="generators with a GPU",
        ),
    ),
)

FILES = Topic(
    heading="The metrics themselves",
    metrics=(
        Metric(
            key="metrics/num_nonfinite",
            meaning="Values of this line that were nan or infinite; they are null in metrics.jsonl.",
        ),
        Metric(
            key="metrics/num_nonfinite_token_values",
            meaning="Values of the step's tokens that were nan or infinite; they are null in tokens.jsonl.",
            when="runs that write rollouts",
        ),
        Metric(
            key="metrics/num_tensorboard_errors",
            meaning="Lines that TensorBoard's files lack because they could not be written, or not yet; "
            "the run goes on without them.",
        ),
        Metric(
            key="metrics/num_wandb_errors",
            meaning="Lines so far that Weights & Biases has not taken; the run goes on without them.",
            when="runs with `logging.wandb`",
        ),
    ),
)

OPERATION_TOPICS = (TIMES, LOAD, SCORING, WEIGHTS, PAYLOADS, MEMORY, FILES)
