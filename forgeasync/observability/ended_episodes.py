"""What the episodes that ended during a step say."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from forgeasync.config import Ending
from forgeasync.rollouts import EpisodeOutcome, ToolStatus

SESSION_COUNTS = (
    "num_requests",
    "num_turns",
    "num_refused",
    "num_failed",
    "num_retries_joined",
    "num_not_honoured",
    "num_with_unknown_fields",
    "num_abandoned",
)
"""Counts of sessions that are metrics."""


class EndedEpisodes:
    """Counts of episodes: by ending since the run began, the rest since the last step."""

    def __init__(self) -> None:
        self._ended: Counter[Ending] = Counter({ending: 0 for ending in Ending})
        self._num_rewritten = 0
        self._num_faulty_calls = 0
        self._tool_calls: Counter[ToolStatus] = Counter({status: 0 for status in ToolStatus})
        self._num_from_text = 0
        self._num_reserved = 0
        self._session_counts: Counter[str] = Counter()
        self._num_artifacts = 0
        self._num_refused_artifacts = 0
        self._num_cut_bytes = 0
        self._outcomes: list[EpisodeOutcome] = []

    def add(self, outcomes: Sequence[EpisodeOutcome]) -> None:
        """Attempts at episodes that have ended."""
        self._outcomes += outcomes
        for outcome in outcomes:
            self._ended[outcome.ending] += 1
            self._num_rewritten += sum(agent.num_rewritten for agent in outcome.agents)
            for agent in outcome.agents:
                self._tool_calls.update(agent.tool_calls)
                self._num_faulty_calls += agent.num_faulty_calls
                self._num_from_text += agent.num_from_text
                self._num_reserved += agent.num_reserved
                for name in SESSION_COUNTS:
                    self._session_counts[name] += agent.session_counts.get(name, 0)
            self._num_artifacts += outcome.num_artifacts
            self._num_refused_artifacts += outcome.num_refused_artifacts
            self._num_cut_bytes += outcome.num_cut_bytes

    def metrics(self) -> dict[str, float]:
        """Return metrics under their names in metrics.jsonl; means are of the last step's episodes."""
        metrics: dict[str, float] = {f"episode/ended_{ending}": num for ending, num in self._ended.items()}
        metrics["episode/num_rewritten_histories"] = self._num_rewritten
        metrics["episode/num_faulty_tool_calls"] = self._num_faulty_calls
        for status, num in self._tool_calls.items():
            metrics[f"episode/num_tool_calls_{status}"] = num
        metrics["episode/num_turns_from_text"] = self._num_from_text
        metrics["episode/num_reserved_texts"] = self._num_reserved
        metrics |= {f"session/{name}": self._session_counts[name] for name in SESSION_COUNTS}
        metrics["episode/num_artifacts"] = self._num_artifacts
        metrics["episode/num_refused_artifacts"] = self._num_refused_artifacts
        metrics["episode/num_cut_record_bytes"] = self._num_cut_bytes
        if whole := [one for one in self._outcomes if one.ending is not Ending.INFRASTRUCTURE]:
            summed_s = sum(one.episode_s for one in whole)
            metrics["episode/turns_mean"] = sum(one.num_turns for one in whole) / len(whole)
            metrics["episode/turns_max"] = max(one.num_turns for one in whole)
            metrics["episode/mean_s"] = summed_s / len(whole)
            metrics["episode/max_s"] = max(one.episode_s for one in whole)
            metrics["episode/sampling_share"] = sum(one.sampling_s for one in whole) / summed_s
            calls_s = [call_s for one in whole for agent in one.agents for call_s in agent.tool_calls_s]
            if calls_s:
                metrics["episode/tool_call_p50_s"] = float(np.percentile(calls_s, 50))
                metrics["episode/tool_call_p95_s"] = float(np.percentile(calls_s, 95))
                metrics["episode/tool_call_max_s"] = max(calls_s)
        return metrics

    def end_step(self) -> None:
        """Begin with another step."""
        self._outcomes.clear()
