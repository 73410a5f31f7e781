"""Generation with vLLM: its engine core runs in this process, and weights change between two of its steps.

 submit ─► held until places are free ─► vLLM's scheduler ─► step ─► finished ─► Response with its spans
                                                              ▲
 load: pause ─► steps under way end ─► fill the model in place ─► note each response's length ─► resume
                                    └► or its adapter alone ───┘

Serves vLLM 0.26 and 0.32 (docs/decisions/0019-vllm-engine.md). With `vllm_weights`, which vLLM's workers load, the
only module that imports vLLM. Import it after `prepare`.
"""

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm import envs as vllm_envs
from vllm.config import lora as vllm_lora
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models import supports_lora
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from tba.contracts import config
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.records import FinishReason, PolicyId, Span
from tba.failpoints import failpoint
from tba.log import MODEL_LOADED, log
from tba.lora import targets_of
from tba.models import build_model, eos_token_ids, weight_tensors, write_assets
from tba.searcher.engines.engine import Request, Response
from tba.searcher.engines.vllm_adapter import (
    ADAPTER_ID,
    adapter_folder,
    adapter_shapes,
    lora_arguments,
    obstacle,
)
from tba.searcher.engines.vllm_folder import EngineFolder
from tba.searcher.engines.vllm_options import (
    admissible,
    admitted_at_once,
    misfit,
    refusal,
    spans_of,
    vllm_options,
    waiting_requests,
    wants_logprobs,
)
from tba.searcher.engines.vllm_weights import SharedWeights
from tba.snapshots.hostmemory import HOST_ALLOCATION

if TYPE_CHECKING:
    from tba.snapshots import Snapshot

_REFUSALS = (ValueError, TypeError, VLLMValidationError)
"""What vLLM raises for a model or settings that it does not take."""
_RANKS = (8, 16, 32, 64, 128, 256)
"""Of vLLM's adapters, where it does not say which."""
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class _Row:
    request: Request
    internal_id: str  # vLLM's name
    starts: list[tuple[PolicyId, int]]  # (policy, tokens there were when it took over)


@dataclass(frozen=True, slots=True)
class _Features:
    """What differs between the versions of vLLM that are served."""

    counts_versions: bool
    """Outputs say which weights made them (0.32)."""
    free_seeds: bool
    """A request's seed costs nothing. The older model runner launches a kernel for every seeded row of every step, and
    on a CPU ends with an error when it splits the prompt of one between two steps."""

    @classmethod
    def of(cls, engine: Any) -> "_Features":
        return cls(
            counts_versions=hasattr(engine, "set_weight_version"),
            free_seeds=bool(getattr(engine.vllm_config, "use_v2_model_runner", False)),
        )


class VllmEngine:
    """One vLLM engine; with tensor parallelism its workers are processes of their own."""

    needs_weights = True

    def __init__(self, settings: config.Engine, model: config.Model, *, cpu: bool) -> None:
        """Raises: UserError if extraArgs are unknown or refused."""
        self._known = {f.name for f in fields(EngineArgs)}
        self._options = vllm_options(settings, model, known=self._known, cpu=cpu, seed=secrets.randbits(31))
        self._model = model
        self._cpu = cpu
        self.takes_adapters = model.lora is not None and not self._options.merge_adapter
        self._merges: str | None = None  # why adapters are merged
        self._shared = SharedWeights() if settings.tensor_parallel_size > 1 else None
        self._engine: Any = None
        self._core: Any = None  # vLLM's EngineCore
        self._seeded = True
        self._sleeps = False  # can leave the device's memory
        self._folder: EngineFolder | None = None
        self._tokenizer: Any = None
        self._eos: list[int] = []
        self._shapes: dict[str, Sequence[int]] = {}
        self._adapter_shapes: dict[str, list[int]] = {}
        self._base: str | None = None  # the snapshot whose weights are in the model, below its adapter
        self._served: Snapshot | None = None
        self._policy = PolicyId(0, 0)
        self._places = 0  # sequences that vLLM decodes together
        self._at_once = 1  # of them free before prompts enter
        self._held: deque[Request] = deque()
        self._rows: dict[int, _Row] = {}  # what vLLM has
        self._ready: list[Response] = []  # for the next step

    @property
    def capacity(self) -> int:
        """Sequences that vLLM decodes together, and a few that wait."""
        return self._places + waiting_requests(self._places) if self._places else 0

    @property
    def in_flight(self) -> int:
        """Submitted and not yet returned."""
        return len(self._held) + len(self._rows) + len(self._ready)

    # --- weights ---

    def load(self, snapshot: "Snapshot") -> None:
        """Start the engine with its first weights, or replace them; responses in flight go on with their cached keys.

        Raises: CorruptObject if they do not fit, or vLLM could not load them; then the old ones serve on.
        """
        if self._engine is None:
            self._examine(snapshot)
        problem = misfit(self._shapes, {name: tensor.shape for name, tensor in snapshot.tensors.items()})
        if problem is None and snapshot.adapter is not None:
            problem = misfit(self._adapter_shapes, {name: t.shape for name, t in snapshot.adapter.items()})
        if problem:
            raise CorruptObject(f"{snapshot.key}: {problem}")
        if self._engine is None:
            self._start(snapshot)
        if not self.takes_adapters:
            snapshot = snapshot.merged()
        self._pause()
        try:
            self._replace(snapshot)
        finally:
            self._core.resume_scheduler()
        self._served = snapshot  # kept: it is what a failed update returns to
        self._take_over(snapshot.manifest.policy)

    def _examine(self, snapshot: "Snapshot") -> None:
        """Learn from the assets what every snapshot of the run must look like, and how its text is read."""
        model, self._tokenizer = build_model(
            snapshot.assets,
            dtype=getattr(torch, self._model.dtype),
            device="cpu",
            trust_remote_code=self._model.trust_remote_code,
        )
        self._shapes = {name: list(tensor.shape) for name, tensor in weight_tensors(model).items()}
        self._eos = sorted(eos_token_ids(self._tokenizer, model.config))
        if self._model.lora is not None:
            self._adapter_shapes = adapter_shapes(targets_of(model, self._model.lora), self._model.lora)

    def _start(self, snapshot: "Snapshot") -> None:
        self._folder = EngineFolder()
        write_assets(snapshot.assets, self._folder.path)
        settings = self._settings(str(self._folder.path))
        if hasattr(vllm_envs, "disable_envs_cache"):
            vllm_envs.disable_envs_cache()  # an earlier engine of this process had another folder
        # It captures CUDA graphs, while the next weights may be on their way in another thread.
        with self._folder.holding_sockets(), HOST_ALLOCATION:
            # In this process: `load` needs to know which step is the last with the old weights.
            self._engine = LLMEngine(
                vllm_config=settings,
                executor_class=Executor.get_class(settings),
                log_stats=False,
                usage_context=UsageContext.LLM_CLASS,
                multiprocess_mode=False,
            )
        self._core = self._engine.engine_core.engine_core
        self._sleeps = bool(settings.model_config.enable_sleep_mode)
        self._features = _Features.of(self._engine)
        seeds = self._options.request_seeds
        self._seeded = self._features.free_seeds if seeds is None else seeds
        self._places = settings.scheduler_config.max_num_seqs
        if self.takes_adapters:
            self._try_adapter()
        graphs = settings.compilation_config.cudagraph_mode
        self._at_once = admitted_at_once(
            self._places,
            wanted=self._options.admitted_at_once,
            only_decoding_has_graphs=graphs is not None and graphs.name == "FULL_DECODE_ONLY",
        )
        log.info(
            MODEL_LOADED,
            engine="vllm",
            max_num_seqs=self._places,
            admitted_at_once=self._at_once,
            request_seeds=self._seeded,
            async_scheduling=bool(settings.scheduler_config.async_scheduling),
            adapter=self._adapter_note(),
        )

    def _settings(self, folder: str) -> Any:
        """vLLM's whole configuration, with an adapter if the run has one and it can be there."""
        try:
            found = self._settings_with_adapter(folder) if self._model.lora is not None else None
            self.takes_adapters = found is not None
            return found or self._configured(folder, {})
        except _REFUSALS as error:
            raise UserError(f"vLLM refuses the model or searcher.engine's settings: {error}") from error

    def _settings_with_adapter(self, folder: str) -> Any | None:
        """None if adapters are to be merged."""
        lora = self._model.lora
        assert lora is not None
        model_config = EngineArgs(model=folder, **self._options.engine_args).create_model_config()
        architecture, _ = get_model_architecture(model_config)
        ranks = get_args(getattr(vllm_lora, "MaxLoRARanks", None)) or _RANKS
        self._merges = obstacle(
            lora,
            merge=self._options.merge_adapter,
            supported=bool(supports_lora(architecture)),
            ranks=ranks,
            dtype=self._model.dtype,
            cpu=self._cpu,
        )
        if self._merges is not None:
            return None
        packed = getattr(architecture, "packed_modules_mapping", {})
        try:
            return self._configured(folder, lora_arguments(lora, ranks=ranks, packed=packed, known=self._known))
        except _REFUSALS as error:  # some settings exclude adapters
            self._merges = f"vLLM refuses adapters with these settings: {error}"
            return None

    def _configured(self, folder: str, more: dict[str, Any]) -> Any:
        arguments = EngineArgs(model=folder, **self._options.engine_args, **more)
        return arguments.create_engine_config(UsageContext.LLM_CLASS)

    def _try_adapter(self) -> None:
        """Find out whether vLLM has a place for every part of an adapter; else adapters are merged.

        vLLM computes without whatever it has no place for, and says nothing.
        """
        try:
            self._adapt(None, scale=1.0)
            for num_modules, lost in self._engine.collective_rpc("tba_adapted", args=(ADAPTER_ID,)):
                if lost or 2 * num_modules != len(self._adapter_shapes):
                    self._merges = f"vLLM has a place for {num_modules} of its parts, and none for {lost[:3]}"
        except Exception as error:  # whatever vLLM raises
            self._merges = f"vLLM did not take it: {error}"
        if self._merges is not None:
            self.takes_adapters = False
            self._engine.remove_lora(ADAPTER_ID)

    def _adapter_note(self) -> str | None:
        if self._model.lora is None:
            return None
        return "beside its base" if self._merges is None else f"merged: {self._merges}"

    def _pause(self) -> None:
        """No new step begins; those under way end and are credited to the weights that made them."""
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        while self._core.batch_queue:
            self._ready += self._collect()

    def _replace(self, snapshot: "Snapshot") -> None:
        try:
            self._fill(snapshot)
        except Exception as error:  # whatever vLLM raises: the model is a mixture now
            if self._served is None:
                raise
            self._fill(self._served)
            raise CorruptObject(
                f"{snapshot.key}: vLLM could not load it ({error}); the old weights serve on"
            ) from error

    def _fill(self, snapshot: "Snapshot") -> None:
        base = snapshot.key if snapshot.adapter is None else snapshot.manifest.base
        if not self.takes_adapters or base != self._base:
            self._base = None  # unless all goes well
            source = snapshot.tensors if self._shared is None else self._shared.put(snapshot.tensors)
            self._engine.collective_rpc("tba_load_weights", args=(source,))
            self._base = base
        if self.takes_adapters:
            self._adapt(snapshot.adapter, scale=snapshot.manifest.scale or 0.0)

    def _adapt(self, adapter: Mapping[str, Tensor] | None, *, scale: float) -> None:
        """Put an adapter in the place of the one there is. None: zeros, so that requests have one from the start."""
        assert self._model.lora is not None
        if adapter is None:
            adapter = {name: torch.zeros(shape) for name, shape in self._adapter_shapes.items()}
        with adapter_folder(adapter, self._model.lora, scale=scale) as folder:
            self._engine.remove_lora(ADAPTER_ID)
            failpoint("engine.before_adapter")
            self._engine.add_lora(LoRARequest("policy", ADAPTER_ID, str(folder)))

    def _take_over(self, policy: PolicyId) -> None:
        self._policy = policy
        if self._features.counts_versions:
            self._engine.set_weight_version(f"{policy.epoch}:{policy.version}")
        states = self._engine.output_processor.request_states
        unstarted: list[_Row] = []
        for row in self._rows.values():
            length = states[row.internal_id].detokenizer.num_output_tokens()
            if length:
                row.starts.append((policy, length))
            else:
                unstarted.append(row)
        # Their prompts may be cached with the old weights. Again, under the new policy's salt.
        self._engine.abort_request([row.internal_id for row in unstarted], internal=True)
        for row in unstarted:
            self._add(row.request)

    # --- turns on a shared device ---

    def sleep(self, *, free_memory: bool) -> None:
        """Begin no step until `wake`. `free_memory`: vLLM's sleep mode, which keeps requests and what they have so far.

        Their cached keys are dropped and computed again; weights wait in the host's memory.
        """
        if self._engine is None:
            return
        self._pause()
        if free_memory and self._sleeps:
            self._core.sleep(level=1, mode="keep")

    def wake(self) -> None:
        """Weights return to the device, and steps begin again."""
        if self._engine is None:
            return
        if self._core.model_executor.is_sleeping:
            self._core.wake_up()
        self._core.resume_scheduler()

    # --- requests ---

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if self._engine is None:
            raise RuntimeError("load a snapshot before submitting requests")
        problem = refusal(request, self._model.max_model_len)
        if problem is None:
            self._held.append(request)
        else:
            self._refuse(request, problem)

    def _refuse(self, request: Request, problem: str) -> None:
        empty = [Span(0, self._policy.epoch, self._policy.version)]
        self._ready.append(Response(request.id, [], FinishReason.LENGTH, empty, None, error=problem))

    def _admit(self) -> None:
        running = len(self._rows)
        for _ in range(
            admissible(held=len(self._held), running=running, max_num_seqs=self._places, at_once=self._at_once)
        ):
            request = self._held.popleft()
            try:
                self._add(request)
            except (ValueError, VLLMValidationError) as error:  # vLLM's own checks, such as of token ids
                self._refuse(request, f"vLLM refused the request: {error}")

    def _add(self, request: Request) -> None:
        # The salt keeps keys of other weights out: while requests are in flight the prefix cache cannot be emptied.
        prompt = tokens_input(list(request.prompt_tokens), cache_salt=f"{self._policy.epoch}:{self._policy.version}")
        # By then it is loaded: its path is looked at no more.
        adapter = LoRARequest("policy", ADAPTER_ID, "/loaded") if self.takes_adapters else None
        internal_id = self._engine.add_request(str(request.id), prompt, self._sampling(request), lora_request=adapter)
        self._rows[request.id] = _Row(request, internal_id, [(self._policy, 0)])

    def _sampling(self, request: Request) -> SamplingParams:
        scored = not request.greedy and wants_logprobs(request.seed, self._options.logprobs_share)
        return SamplingParams(
            n=1,
            temperature=0.0 if request.greedy else request.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            seed=request.seed if self._seeded and not request.greedy else None,
            max_tokens=request.max_tokens,
            min_tokens=0,
            ignore_eos=False,
            stop_token_ids=self._eos,
            stop=list(request.stop) or None,
            detokenize=bool(request.stop),  # vLLM needs the text for nothing else
            logprobs=0 if scored else None,  # of the sampled token alone
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> list[Response]:
        """One step of vLLM. Raises: whatever ends its engine."""
        self._admit()
        ready, self._ready = self._ready, []
        return ready + self._collect() if self._rows else ready

    def _collect(self) -> list[Response]:
        return [self._response(output) for output in self._finished(self._engine.step())]

    def _finished(self, outputs: Iterable[Any]) -> list[Any]:
        return [output for output in outputs if output.finished and int(output.request_id) in self._rows]

    def _response(self, output: Any) -> Response:
        row = self._rows.pop(int(output.request_id))
        made = output.outputs[0]
        tokens = list(made.token_ids)
        spans = spans_of(row.starts, len(tokens))
        reason = _REASONS.get(made.finish_reason)
        if reason is None:
            error = f"vLLM ended the request early: {made.finish_reason}"
            return Response(row.request.id, tokens, FinishReason.LENGTH, spans, None, error=error)
        logprobs = None
        if made.logprobs is not None:
            logprobs = [scores[token].logprob for scores, token in zip(made.logprobs, tokens, strict=True)]
        return Response(row.request.id, tokens, reason, spans, logprobs)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def abort(self) -> None:
        """Forget all requests."""
        if self._engine is not None:
            self._engine.abort_request([row.internal_id for row in self._rows.values()], internal=True)
        self._held.clear()
        self._rows.clear()
        self._ready.clear()

    def close(self) -> None:
        """End vLLM's processes and free what it holds."""
        self.abort()
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine = self._core = self._served = None
        if self._shared is not None:
            self._shared.close()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
