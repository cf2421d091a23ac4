"""Definitions of the metrics of runs with an environment."""

from forgeasync.observability.metric import Metric, Topic

_ENVIRONMENT = "runs with an environment"
_EPISODES = "steps during which episodes of training ended, in runs with an environment"
_TOOLS = "steps during which episodes of training ended that had called tools"

EPISODES = Topic(
    heading="Environments",
    metrics=(
        Metric(
            key="episode/turns_mean",
            meaning="Mean number of the model's turns, all agents together, over the episodes of training "
            "that ended during the step.",
            when=_EPISODES,
        ),
        Metric(
            key="episode/turns_max",
            meaning="Largest number of turns of one of these episodes.",
            when=_EPISODES,
        ),
        Metric(
            key="episode/mean_s",
            meaning="Mean number of seconds that these episodes took.",
            when=_EPISODES,
        ),
        Metric(
            key="episode/max_s",
            meaning="Seconds that the longest of these episodes took.",
            when=_EPISODES,
        ),
        Metric(
            key="episode/sampling_share",
            meaning="Share of these episodes' time in which a turn of the model was under way; the rest is "
            "the environment's.",
            when=_EPISODES,
        ),
        Metric(
            key="episode/ended_<reason>",
            meaning="Attempts at episodes of training so far that ended so (`Ending` in "
            "forgeasync/config/episodes.py). `episodes.endings` says what becomes of them.",
            when="runs with an environment, for each reason",
        ),
        Metric(
            key="episode/num_rewritten_histories",
            meaning="Times so far that messages came back with another history than the model had seen, or "
            "could not be appended to it: they began another branch.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_artifacts",
            meaning="Files so far that episodes of training have kept (`agent.keep`).",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_refused_artifacts",
            meaning="Files so far that these episodes wanted to keep and that were too many or too large.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_held_records",
            meaning="Whole episodes that the controller holds, of groups that have neither trained nor been "
            "lost.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_cut_record_bytes",
            meaning="Bytes so far, as JSON, of messages for which the records of these episodes had no room: "
            "texts, tool calls and whole messages.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_dropped_records",
            meaning="Whole episodes so far that rollouts.jsonl cannot have, because as many were held "
            "already.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_faulty_tool_calls",
            meaning="Tool calls of the model so far that could not be read.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_tool_calls_<status>",
            meaning="Calls of tools so far that ended so (`ToolStatus` in forgeasync/rollouts/rollout.py), "
            "in attempts at episodes of training. The model is told of every failure.",
            when="runs with an environment, for each status",
        ),
        Metric(
            key="episode/tool_call_p50_s",
            meaning="Median number of seconds from a call of a tool to its result, over the episodes of "
            "training that ended during the step.",
            when=_TOOLS,
        ),
        Metric(
            key="episode/tool_call_p95_s",
            meaning="Seconds that nineteen of twenty of these calls did not exceed (95th percentile).",
            when=_TOOLS,
        ),
        Metric(
            key="episode/tool_call_max_s",
            meaning="Seconds that the longest of these calls took.",
            when=_TOOLS,
        ),
        Metric(
            key="episode/num_turns_from_text",
            meaning="Assistant's messages so far that stood in rewritten histories and were not as the "
            "model had sampled them: their tokens were made from text, and do not train.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="episode/num_reserved_texts",
            meaning="Texts so far that stood in messages of users and tools and would have become tokens "
            "such as `<|im_end|>`: they were divided by an invisible character.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_requests",
            meaning="Requests for turns so far by agents that bring their own loop (docs/sessions.md).",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_turns",
            meaning="Turns sampled so far for such requests.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_refused",
            meaning="Such requests so far that were answered with a status from 400 to 499.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_failed",
            meaning="Such requests so far that were answered with a status of 500 and above.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_retries_joined",
            meaning="Repeated requests so far that got what an earlier attempt had sampled.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_not_honoured",
            meaning="Requests so far with fields such as `temperature`, for which the run's own values "
            "were used.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_with_unknown_fields",
            meaning="Requests so far with fields that no endpoint knows, such as those of a newer client "
            "library. They were ignored; the header `x-forgeasync-ignored` and the log name them.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="session/num_abandoned",
            meaning="Turns so far that were sampled, or begun, and that no client has got.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="environment/num_restarted_workers",
            meaning="Environment workers so far that died, stopped answering or were stuck, and were "
            "replaced.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="environment/num_admission_waits",
            meaning="Groups so far that had to wait because the KV cache of their generator was fuller than "
            "`episodes.max_kv_usage`.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="environment/num_live_episodes",
            meaning="Episodes under way, those of evaluation included.",
            when=_ENVIRONMENT,
        ),
        Metric(
            key="environment/num_killed_processes",
            meaning="Processes that episodes had started and that were killed so far because the episodes "
            "did not end by themselves.",
            when=_ENVIRONMENT,
        ),
    ),
)
