# Parameters of every public class and function, `...` for a default. What goes from here breaks the code of
# users: tests/test_api.py. Written by python -m tests.support.public_signatures.
def Advantage(): ...
def AgeWeight(*, kind=..., half_life): ...
def Aggregation(): ...
def AnswerCheck(*, prefix=..., part=..., match=...): ...
def Bubblewrap(
    *,
    memory_mib=...,
    disk_mib=...,
    max_files=...,
    max_processes=...,
    max_open_files=...,
    cpu_s=...,
    output_kib=...,
    mounts=...,
    env=...,
    kind=...,
    program=...,
): ...
def Cispo(*, kind=..., clip_low=..., clip_high): ...
def ConfigError(problems): ...
def ConstantLength(*, kind=..., length): ...
def Correction(): ...
def DecoupledPpo(*, kind=..., clip=..., behavior_cap=...): ...
def Docker(
    *,
    memory_mib=...,
    disk_mib=...,
    max_files=...,
    max_processes=...,
    max_open_files=...,
    cpu_s=...,
    output_kib=...,
    mounts=...,
    env=...,
    image,
    program=...,
    start_s=...,
    kind=...,
): ...
def DrGrpo(*, kind=...): ...
def DynamicSampling(*, kind=..., min_std=...): ...
def EndedSession(*, end, feedback, branches): ...
def Environment(): ...
def ExecResult(
    *,
    exit_code,
    stdout,
    stderr,
    timed_out,
    num_stdout_bytes_cut,
    num_stderr_bytes_cut,
    duration_s,
    killed_by,
): ...
def Filter(): ...
def Filtered(*, kept, rewards, reason, num_dropped): ...
def Fleet(prepared, trainer, generators, scorer, groups, teaching): ...
def Group(
    *,
    group_id,
    draw_id,
    task,
    rollouts,
    rewards=...,
    scores=...,
    steps=...,
    durations_ms=...,
): ...
def GroupFacts(*, rewards, lengths, is_truncated, penalties=...): ...
def GroupPassAtK(*, kind=..., pass_at_k): ...
def Grpo(*, kind=...): ...
def Gspo(*, kind=..., clip_low=..., clip_high=...): ...
def HttpServer(*, kind, url, headers=...): ...
def IcePop(*, kind=..., low=..., high=...): ...
def K1(*, kind=...): ...
def K2(*, kind=...): ...
def K3(*, kind=...): ...
def Kimi15(*, kind=..., tau): ...
def KlEstimator(): ...
def Loss(*, objective=..., corrections=..., aggregation=..., kl=..., terms=...): ...
def MaskedIs(*, kind=..., low, high, level=...): ...
def McpEnvironment(
    *,
    kind,
    servers,
    start_s=...,
    system_prompt=...,
    max_rounds=...,
    max_result_characters=...,
    answer=...,
): ...
def McpTools(servers, *, start_s=...): ...
def Objective(): ...
def OffPolicySequenceMask(*, kind=..., threshold): ...
def OverlongFilter(*, kind=...): ...
def OverlongPenalty(*, kind=..., max_length, buffer_share=...): ...
def PlainCalls(
    *,
    call_prefix,
    call_suffix,
    result_prefix=...,
    result_suffix=...,
    error_text=...,
): ...
def Podman(
    *,
    memory_mib=...,
    disk_mib=...,
    max_files=...,
    max_processes=...,
    max_open_files=...,
    cpu_s=...,
    output_kib=...,
    mounts=...,
    env=...,
    image,
    program=...,
    start_s=...,
    kind=...,
): ...
def PpoClip(*, kind=..., clip_low=..., clip_high=..., dual_clip=...): ...
def PythonResult(
    *,
    stdout,
    stderr,
    value,
    traceback,
    timed_out,
    num_stdout_bytes_cut,
    num_stderr_bytes_cut,
    num_report_bytes_cut,
    duration_s,
    killed_by,
    session_ended,
    exit_code,
): ...
def PythonTool(
    *,
    kind,
    system_prompt=...,
    max_rounds=...,
    max_result_characters=...,
    answer=...,
    plain_calls=...,
): ...
def Reinforce(*, kind=...): ...
def ReinforcePlusPlus(*, kind=...): ...
def RemoteEnvironment(*, kind, url, task_fields=..., model=..., health_s=..., correct_at=...): ...
def ReplayRouter(config): ...
def ResampleOnCorrect(*, kind=..., num_kept, min_positive_reward=..., smoothing=...): ...
def Response(text, num_tokens, finish_reason): ...
def Reward(): ...
def Rloo(*, kind=...): ...
def Rollout(
    *,
    prompt_ids_P,
    response_ids_T,
    logprobs_T,
    version_spans,
    text,
    finish_reason,
    routed_experts=...,
    kept_tokens=...,
    is_sampled_T=...,
    request_spans=...,
    forks=...,
): ...
def RowTokens(
    *,
    logprobs_T,
    behavior_logprobs_T,
    advantages_T,
    mask_T,
    sequence_ids_T,
    ages_T,
    sample_weights_T=...,
    ref_logprobs_T=...,
    proximal_logprobs_T=...,
    full_logprobs_T=...,
    teacher=...,
): ...
def RunConfig(
    *,
    name,
    seed=...,
    max_steps,
    run_dir=...,
    max_off_policy_steps=...,
    fidelity=...,
    record_execution=...,
    model,
    data,
    sampling,
    generator=...,
    trainer,
    algorithm,
    buffer=...,
    accounting=...,
    payload=...,
    weights=...,
    lora=...,
    checkpoint=...,
    scorer=...,
    teachers=...,
    environment=...,
    episodes=...,
    agents=...,
    sandbox=...,
    serving=...,
    evaluation,
    logging=...,
    timeouts=...,
    launcher=...,
    warmup=...,
): ...
def Sandbox(section=..., *, workspace=...): ...
def SandboxBackend(): ...
def Score(
    value,
    is_correct,
    *,
    parts=...,
    steps=...,
    penalties=...,
    has_answer=...,
    feedback=...,
    status=...,
    scorer=...,
    scorer_version=...,
): ...
def SequenceMeanOfTokenMean(*, kind=...): ...
def SequenceMeanOfTokenSum(*, kind=...): ...
def ServedSessions(): ...
def ShellResult(
    *,
    exit_code,
    stdout,
    stderr,
    timed_out,
    num_stdout_bytes_cut,
    num_stderr_bytes_cut,
    duration_s,
    killed_by,
    session_ended,
): ...
def SingleTurn(reward): ...
def StdioServer(*, kind=..., command, env=..., cwd=...): ...
def Step(*, end, value): ...
def Supervised(*, kind=...): ...
def Task(*, task_id, prompt, answer, source_index, source, record=...): ...
def TokenMean(*, kind=...): ...
def Tool(*, spec, run): ...
def ToolCall(*, id, name, arguments): ...
def ToolResult(*, call_id, name, status, content, num_cut_characters=..., took_s=...): ...
def ToolRun(*, messages, turn, results, num_broken_calls, is_finished): ...
def Toolbox(tools, *, max_characters=...): ...
def Topr(*, kind=...): ...
def TrainResult(*, run_dir, metrics, checkpoint): ...
def Transport(): ...
def TruncatedIs(*, kind=..., cap=..., level=...): ...
def Turn(
    *,
    text,
    num_tokens,
    finish_reason,
    stop_text=...,
    reasoning=...,
    tool_calls=...,
    broken_tool_calls=...,
    num_prompt_tokens=...,
): ...
def UnbiasedK3(*, kind=...): ...
def UnsafeSubprocess(
    *,
    memory_mib=...,
    disk_mib=...,
    max_files=...,
    max_processes=...,
    max_open_files=...,
    cpu_s=...,
    output_kib=...,
    mounts=...,
    env=...,
    kind=...,
): ...
def as_feedback(text): ...
def dump_config(config): ...
def kept_logprobs(logits_TV, token_ids_T, kept_offsets, kept_ids, temperature=...): ...
def load_config(paths, overrides=...): ...
def math_reward(response, answer, *, allow_weaker_isolation=...): ...
def run_tools(agent, messages, toolbox, *, max_rounds=..., form=...): ...
def train(
    config,
    overrides=...,
    *,
    reward=...,
    environment=...,
    objective=...,
    advantage=...,
    resume=...,
): ...
