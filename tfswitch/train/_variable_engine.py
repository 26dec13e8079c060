"""The engine of SyncReplicasOptimizer for TensorFlow's parameter servers."""

import contextlib
import functools
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfswitch import _loader, _native
from tfswitch._connection import _control_calls
from tfswitch._connection._control_calls import integers
from tfswitch.train._checks import group_options
from tfswitch.train._engine import (
    Engine,
    ReplicaOptions,
    StepFinder,
    local_variable,
    scaled,
)
from tfswitch.train._server_sessions import (
    ServerWatch,
    repeat_lost,
    wait_for_answers,
)
from tfswitch.train.barrier import END_OF_EPOCH, EPOCH_SECS
from tfswitch.train.worker import PARTING_SECS, group_stats

# cc/ops/replicas_ops.cc and cc/ops/gradient_stage_ops.cc describe the inputs,
# attributes and outputs of the ops.
_ops = _loader.load_ops()

_TRAINABLE = (tf.float32, tf.float64, tf.float16, tf.bfloat16)

# Waits are made in parts of this length, so that Ctrl-C has an effect.
_WAIT_PART_SECS = 1.0

# How long one request of the applier waits for a round. The wait is long,
# because the server logs each request that gets no round.
_ROUND_PART_SECS = 300.0

# A server is given up after a silence of this many lease times.
_PATIENCE_LEASES = 3


class VariableEngine(Engine):
    """Trains variables that TensorFlow's parameter servers keep.

    The first of these servers decides which gradients make a step. Gradients
    wait on the servers of their variables for this decision. Then the chief
    sums them and takes the step.

    Args:
        options: The optimizer's options.
        opt: The optimizer that takes the steps.
        pairs: Gradients and variables, which are on servers.
        global_step: Counts the steps of all workers.
        name: The name of the train operation.

    Raises:
        ValueError: If a variable cannot be trained.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        opt: Any,
        pairs: Sequence[tuple[Any, Any]],
        global_step: Any,
        name: str | None,
    ) -> None:
        self._options = options
        self._pings: dict[str, tf.Operation] = {}  # One for each server.
        self._watch: ServerWatch | None = None
        self._heartbeat_session: Any = None  # A session.
        self._variables = [variable for _, variable in pairs]
        self._check_support()
        self._applier = 0  # 0 if another worker applies the steps.
        self._incarnation = 0
        self._process = ""  # The identity of this process.
        # How often this incarnation was at barriers.
        self._barrier_generation = 0
        self._applying: threading.Thread | None = None
        self._is_over = threading.Event()
        self.servers: Sequence[str] = sorted(
            {_server_of(v) for v in self._variables}
        )
        self.join_secs = options.join_secs
        self._first_server = _first_task(self.servers[0])
        with tf.compat.v1.name_scope(name, "sync_replicas"):
            self._place = local_variable([0, 0, 0], tf.int64, "place")
            self._request = tf.compat.v1.placeholder(tf.string, [], "request")
            self._response = _run_on(
                self._first_server,
                _ops.tfswitch_replicas_call,
                request=self._request,
            )
            self._applier_input = tf.compat.v1.placeholder(
                tf.int64, [], "applier"
            )
            self._heartbeat = _run_on(
                self._first_server,
                _ops.tfswitch_replicas_heartbeat,
                place=self._place.read_value(),
                applier=self._applier_input,
                group=options.name,
                worker=options.task_index,
            )
            self._add_pings(self.servers)
            self._clear = [
                _run_on(
                    server,
                    _ops.tfswitch_clear_staged_gradients,
                    stage=options.name,
                )
                for server in self.servers
            ]
            ended = self._end_step(pairs)
            self.trains = StepFinder(ended.op).trains
            self.train_op = self._place.assign(ended, read_value=False)
            self._apply_round = self._step_of_all(opt, pairs, global_step)

    def _check_support(self) -> None:
        if self._options.cluster is not None:
            raise ValueError(
                "the variables are on TensorFlow's parameter servers, and "
                "`cluster` is one of tfswitch's. Leave it out; or, to train "
                "with the cluster, build the model without "
                "tf.compat.v1.train.replica_device_setter"
            )
        for variable in self._variables:
            if variable.dtype.base_dtype not in _TRAINABLE:
                raise ValueError(
                    f"variable '{variable.name}' is of "
                    f"{variable.dtype.base_dtype.name}, and gradients of "
                    "float16, bfloat16, float32 and float64 can be summed"
                )

    def _end_step(self, pairs: Sequence[tuple[Any, Any]]) -> tf.Tensor:
        """Sends gradients to the servers; returns the key of the next step."""
        options = self._options
        weight = options.weight()
        share = None
        if options.normalize == "initial":
            share = options.share_of_step(weight)
        place = self._place.read_value()
        staged = []
        for server in self.servers:
            tensors: list[tf.Tensor] = []
            for gradient, variable in pairs:
                if _server_of(variable) != server:
                    continue
                averages_rows = options.sparse_average == "rows" and isinstance(
                    gradient, tf.IndexedSlices
                )
                if share is not None and not averages_rows:
                    gradient = scaled(gradient, share)
                tensors.extend(_tensors_of(gradient))
            staged.append(
                _run_on(
                    server,
                    _ops.tfswitch_stage_gradients,
                    key=place,
                    gradients=tensors,
                    stage=options.name,
                    worker=options.task_index,
                    # With late="carry", a late gradient stays on the server
                    # when the next gradient of the same worker arrives.
                    replaces=options.late == "drop",
                )
            )
        with tf.control_dependencies(staged):
            return _run_on(
                self._first_server,
                _ops.tfswitch_replicas_end_step,
                place=tf.identity(place),
                weight=options.counted_weight(weight),
                group=options.name,
                worker=options.task_index,
                timeout_s=options.wait_secs,
            )

    def _step_of_all(
        self, opt: Any, pairs: Sequence[tuple[Any, Any]], global_step: Any
    ) -> Any:
        """Returns the op that takes one step with the gradients of a round."""
        options = self._options
        of_round = _run_on(
            self._first_server,
            _ops.tfswitch_replicas_next_round,
            applier=self._applier_input,
            group=options.name,
            timeout_s=_ROUND_PART_SECS,
        )
        sums: dict[int, Any] = {}
        for server in self.servers:
            here = [
                (i, gradient, variable)
                for i, (gradient, variable) in enumerate(pairs)
                if _server_of(variable) == server
            ]
            of_rows = [isinstance(g, tf.IndexedSlices) for _, g, _ in here]
            types = [
                tensor.dtype
                for _, gradient, _ in here
                for tensor in _tensors_of(gradient)
            ]
            tensors = _run_on(
                server,
                _ops.tfswitch_sum_staged_gradients,
                keys=of_round.keys,
                weights=of_round.weights,
                active=of_round.active,
                next_incarnation=of_round.next_incarnation,
                T=types,
                of_rows=of_rows,
                stage=options.name,
                averages=options.normalize != "initial",
                averages_by_row=options.sparse_average == "rows",
            )
            tensors = list(tensors)
            for (i, _, variable), has_rows in zip(here, of_rows, strict=True):
                sums[i] = _gradient_of(tensors, has_rows, variable)
        aggregated = [
            (sums[i], variable) for i, (_, variable) in enumerate(pairs)
        ]
        if options.post_aggregate is not None:
            aggregated = list(options.post_aggregate(aggregated))
        applied = options.average(opt.apply_gradients(aggregated, global_step))
        # Depends on all sums, because a server keeps the gradients of the round
        # only until the next op confirms the round.
        summed = [
            g.values if isinstance(g, tf.IndexedSlices) else g
            for g in sums.values()
        ]
        with tf.control_dependencies([applied, *summed]):
            return _run_on(
                self._first_server,
                _ops.tfswitch_replicas_confirm_round,
                applier=self._applier_input,
                number=of_round.number,
                group=options.name,
            )

    def complete_graph(self) -> None:
        """Adds pings for servers whose variables are not trained."""
        # A graph that already had a session is final: no operation can be
        # added.
        if not tf.compat.v1.get_default_graph().finalized:
            of_first = _job_of(self._first_server)
            self._add_pings(
                _server_of(v)
                for v in tf.compat.v1.global_variables()
                if _job_of(v.device or "") == of_first
            )

    def _add_pings(self, servers: Iterable[str]) -> None:
        for server in {*servers} - self._pings.keys():
            with tf.device(server):
                self._pings[server] = tf.no_op("ping")

    def check_is_alone(self, session: Any) -> None:
        with _python_errors():
            response = _run_on(
                self._first_server,
                _ops.tfswitch_replicas_call,
                request=json.dumps({"group": self._options.name}),
            )
            self._check_is_alone(json.loads(session.run(response)))

    def _check_is_alone(self, stats_answer: Mapping[str, Any]) -> None:
        options = self._options
        processes = stats_answer["stats"].get("processes", {})
        answer = _control_calls.call(
            _native,
            "CheckIsAlone",
            group=options.name,
            worker=options.task_index,
            process=processes.get(str(options.task_index)),
        )
        self._process = answer["process"]

    def start(self, session: Any, is_chief: bool) -> None:
        """Joins the workers; the chief also begins to take the steps."""
        self._run = session.run
        is_over = self._is_over = threading.Event()
        self._has_step_failed = False
        self._heartbeat_session = None
        # Heartbeats have a session of their own. In the user's session they
        # would wait while TensorFlow prepares the graph for the first run with
        # other fetches.
        heartbeat_session = tf.compat.v1.Session(
            session.sess_str, session.graph, session._config
        )
        heartbeats: dict[str, Callable[[], Any]] = {
            server: functools.partial(heartbeat_session.run, ping)
            for server, ping in self._pings.items()
        }
        heartbeats[self._first_server] = lambda: heartbeat_session.run(
            self._heartbeat, {self._applier_input: self._present_applier()}
        )
        lease_secs = self._options.lease_secs
        self._watch = ServerWatch(
            heartbeats, lease_secs / 3.0, _PATIENCE_LEASES * lease_secs
        )
        try:
            # The first run of a session prepares its graph. If a second thread
            # ran meanwhile, all sessions of the graph would wait, even without
            # end if a server does not answer.
            wait_for_answers(
                lambda: heartbeat_session.run(list(self._pings.values())),
                sorted(self._pings),
                self.join_secs,
            )
            self._heartbeat_session = heartbeat_session
            self._watch.start()
            # If the program did not make its session by tfswitch's function,
            # this check was not made before.
            self._check_is_alone(self._call({"call": "STATS"}))
            if is_chief:
                self._session_run(self._clear)
                begun = self._call({"call": "BEGIN_APPLYING"})
                applier = self._applier = int(begun["applier"])
                take_step = session.make_callable(
                    self._apply_round, [self._applier_input]
                )
                self._applying = threading.Thread(
                    target=self._apply_rounds,
                    args=(take_step, applier, is_over),
                    daemon=True,
                )
                self._applying.start()
            self._join(previous=0)
        except BaseException:
            self.part()
            raise

    def call(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return self._present_watch().call(function, *args, **kwargs)

    def close(self, function: Callable[[], Any]) -> None:
        if self._watch is None:  # The start failed.
            function()
            return
        with contextlib.ExitStack() as ending:
            ending.callback(self._watch.stop)
            if self._heartbeat_session is not None:
                ending.callback(
                    self._watch.close, self._heartbeat_session.close
                )
            self._watch.close(function)

    def resume(self) -> None:
        """Joins again if the last step has raised an error.

        The failed step may still count, if its error came while it waited for
        other workers.
        """
        if self._has_step_failed:
            self._join(previous=int(self._session_run(self._place)[0]))
            self._has_step_failed = False

    def end_epoch(self) -> None:
        """Waits until all workers end the epoch and all steps are applied."""
        self.resume()
        while True:
            try:
                answer = self._wait(
                    {
                        "call": "WAIT_AT_BARRIER",
                        "barrier": END_OF_EPOCH,
                        **self._visit(),
                    },
                    EPOCH_SECS,
                )
                break
            except LookupError:  # The group gave this worker up.
                self._join(previous=self._incarnation)
        self._barrier_generation += 1
        self._set(answer["place"])

    def leave(self) -> None:
        """Waits until all others end their sessions, and leaves with them."""
        try:
            self._wait(
                {
                    "call": "LEAVE_TOGETHER",
                    "applier": self._applier,
                    **self._visit(),
                },
                EPOCH_SECS,
            )
        except LookupError:  # The group gave this worker up.
            self.part()
        self._is_over.set()
        if self._applying is not None:
            self._applying.join()
            self._session_run(self._clear)
        self._applying = None
        self._applier = 0

    def part(self) -> None:
        if self._run is None or self._is_over.is_set():
            return
        self._is_over.set()
        run = self._run
        request = {
            "group": self._options.name,
            "call": "LEAVE",
            "worker": self._options.task_index,
            "place": {"incarnation": self._incarnation},
            "applier": self._applier,
        }
        self._present_watch().try_for(
            PARTING_SECS,
            lambda: run(self._response, {self._request: json.dumps(request)}),
        )

    def stats(self) -> dict[str, Any]:
        """Returns the counts of all workers since the session began."""
        return group_stats(self._call({"call": "STATS"})["stats"])

    def _session_run(self, *args: Any) -> Any:
        with _python_errors():
            return super()._session_run(*args)

    def _present_watch(self) -> ServerWatch:
        assert self._watch is not None  # There is a session.
        return self._watch

    def _present_applier(self) -> int:
        """Returns the number under which this worker applies steps, or 0."""
        applying = self._applying
        is_applying = applying is not None and applying.is_alive()
        return self._applier if is_applying else 0

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        options = self._options
        text = json.dumps(
            {
                "group": options.name,
                "worker": options.task_index,
                "options": group_options(
                    num_workers=options.num_workers,
                    lease_secs=options.lease_secs,
                    join_secs=options.join_secs,
                    contributions_per_round=options.num_gradients
                    if options.num_gradients < options.num_workers
                    else 0,
                    late=options.late,
                    settings=self._settings(),
                ),
                **request,
            }
        )
        run = self._run
        assert run is not None  # There is a session.
        with _python_errors():
            # Answers may be lost. All requests of this method have the same
            # effect when they are repeated.
            response = repeat_lost(
                lambda: self.call(run, self._response, {self._request: text})
            )
        return json.loads(response)

    def _wait(
        self, request: Mapping[str, Any], timeout_secs: float
    ) -> dict[str, Any]:
        give_up = time.monotonic() + timeout_secs
        while True:
            left = give_up - time.monotonic()
            part = max(0.0, min(left, _WAIT_PART_SECS))
            answer = self._call({**request, "wait_secs": part})
            waits_for = answer["waits_for"]
            if not waits_for:
                return answer
            if left <= 0.0:
                raise TimeoutError(
                    f"{waits_for}; gave up after {timeout_secs:g} s"
                )
            if "place" in answer:
                request = {**request, "place": answer["place"]}

    def _settings(self) -> str:
        """Returns, in words, the settings that all workers of a job share."""
        model = "\n".join(
            f"{v.op.name} {v.shape} {v.dtype.base_dtype.name} {v.device}"
            for v in self._variables
        )
        graph = zlib.crc32(model.encode())
        options = self._options
        return (
            f"normalize={options.normalize}, "
            f"sparse_average={options.sparse_average}, model={graph:08x}"
        )

    def _visit(self) -> dict[str, Any]:
        """Returns the fields of a request about the worker's next barrier."""
        incarnation = int(self._session_run(self._place)[0])
        if incarnation != self._incarnation:  # A step has joined again.
            self._incarnation = incarnation
            self._barrier_generation = 0
        return {
            "place": {"incarnation": incarnation},
            "barrier_generation": self._barrier_generation,
        }

    def _join(self, previous: int) -> None:
        answer = self._wait(
            {
                "call": "JOIN",
                "previous": previous,
                "applier": self._applier,
                "process": self._process,
            },
            self._options.join_secs,
        )
        self._incarnation = int(answer["place"]["incarnation"])
        self._barrier_generation = 0
        self._set(answer["place"])

    def _set(self, place: Mapping[str, Any]) -> None:
        names = ("incarnation", "clock", "round")
        self._load(self._place, list(integers(place, names).values()))

    def _apply_rounds(
        self, take_step: Any, applier: int, is_over: threading.Event
    ) -> None:
        while not is_over.is_set():
            try:
                take_step(applier)
            except tf.errors.DeadlineExceededError:
                continue  # No round has closed.
            except Exception as error:
                # If `is_over` is set, all workers have left, and no worker
                # needs this step.
                if is_over.is_set():
                    return
                is_of_tensorflow = isinstance(error, tf.errors.OpError)
                why = plain_message(error) if is_of_tensorflow else repr(error)
                request = {"call": "FAIL_APPLYING", "applier": applier}
                # If the session is closed, or its servers are gone, the other
                # workers notice it when the lease ends.
                with contextlib.suppress(ConnectionError, RuntimeError):
                    self._call({**request, "why": why})
                return


def _run_on(device: str, op: Callable[..., Any], **arguments: Any) -> Any:
    """Makes an op that runs on a server, which must have imported tfswitch."""
    with tf.device(None), tf.device(device):
        return op(**arguments)


def _server_of(variable: Any) -> str:
    """Returns the host of the device that a variable is on."""
    place = tf.DeviceSpec.from_string(variable.device)
    return place.replace(device_type="CPU", device_index=0).to_string()


def _job_of(device: str) -> str | None:
    return tf.DeviceSpec.from_string(device).job


def _first_task(device: str) -> str:
    return tf.DeviceSpec.from_string(device).replace(task=0).to_string()


def _tensors_of(gradient: Any) -> list[tf.Tensor]:
    """Returns the tensors that represent a gradient on its way to a server."""
    if isinstance(gradient, tf.IndexedSlices):
        return [tf.cast(gradient.indices, tf.int64), gradient.values]
    return [tf.convert_to_tensor(gradient)]


def _gradient_of(
    tensors: list[tf.Tensor], has_rows: bool, variable: Any
) -> Any:
    """Removes the first tensors of a list, and makes a gradient of them."""
    if not has_rows:
        total = tensors.pop(0)
        total.set_shape(variable.shape)
        return total
    indices, values = tensors.pop(0), tensors.pop(0)
    indices.set_shape([None])
    values.set_shape([None, *variable.shape[1:]])
    shape = tf.constant(variable.shape.as_list(), tf.int64)
    return tf.IndexedSlices(values, indices, shape)


def plain_message(error: tf.errors.OpError) -> str:
    """Returns an operation's message, without names of code and devices."""
    # The session's error wraps an error of the runtime, whose message is plain.
    raw = error.__context__
    text = raw.message if isinstance(raw, tf.errors.OpError) else error.message
    for line in text.splitlines():
        if line and not re.match(
            r"=+$|([A-Z_]+: )?From /job:|Graph exec", line
        ):
            return line
    return text


@contextlib.contextmanager
def _python_errors() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        kinds = (
            (tf.errors.NotFoundError, LookupError),
            (tf.errors.AlreadyExistsError, ValueError),
            (tf.errors.InvalidArgumentError, ValueError),
            (tf.errors.DeadlineExceededError, TimeoutError),
            (tf.errors.UnavailableError, ConnectionError),
            (tf.errors.AbortedError, ConnectionError),
        )
        message = plain_message(error)
        if "Op type not registered 'Tfswitch>" in message:
            raise RuntimeError(
                "a parameter server does not know tfswitch's operations: "
                "import tfswitch in the program that makes its "
                f"tf.distribute.Server. {message.split('. ')[0]}"
            ) from error
        for theirs, ours in kinds:
            if isinstance(error, theirs):
                raise ours(message) from error
        raise RuntimeError(message) from error
