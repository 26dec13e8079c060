"""Sessions on TensorFlow's parameter servers that wait no longer than asked."""

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# How often a worker looks whether the chief has initialised the variables. The
# 30 s of TensorFlow would have the others wait for it.
_POLL_SECS = 0.2


class WaitingSessionCreator(tf.compat.v1.train.SessionCreator):
    """TensorFlow's `WorkerSessionCreator`, which looks for the chief oftener.

    Args:
        scaffold: A `tf.compat.v1.train.Scaffold`, or None.
        master: Of the session.
        config: Of the session.
        max_wait_secs: How long it waits for the chief.
    """

    def __init__(
        self, scaffold: Any, master: str, config: Any, max_wait_secs: float
    ) -> None:
        self._scaffold = scaffold or tf.compat.v1.train.Scaffold()
        self._master = master
        self._config = config
        self._max_wait_secs = max_wait_secs

    def create_session(self) -> Any:
        """Returns a session whose variables the chief has initialised.

        Raises:
            TimeoutError: If it has not in time.
        """
        scaffold = self._scaffold
        scaffold.finalize()
        manager = tf.compat.v1.train.SessionManager(
            local_init_op=scaffold.local_init_op,
            local_init_feed_dict=scaffold.local_init_feed_dict,
            ready_op=scaffold.ready_op,
            ready_for_local_init_op=scaffold.ready_for_local_init_op,
            graph=tf.compat.v1.get_default_graph(),
            recovery_wait_secs=_POLL_SECS,
        )
        try:
            return manager.wait_for_session(
                self._master,
                config=self._config,
                max_wait_secs=self._max_wait_secs,
            )
        except tf.errors.DeadlineExceededError as error:
            raise TimeoutError(
                "the chief has not initialised the variables within "
                f"{self._max_wait_secs:g} s: is worker 0 running?"
            ) from error


def check_servers_answer(
    master: str, config: Any, servers: Sequence[str], timeout_secs: float
) -> None:
    """Waits for servers, where a session would wait for ever.

    Args:
        master: Of the session.
        config: Of the session.
        servers: Their devices.
        timeout_secs: Longest wait.

    Raises:
        ConnectionError: If one does not answer in time.
    """
    errors: list[Exception] = []

    def ask() -> None:
        try:
            with tf.Graph().as_default():
                asked = []
                for server in servers:
                    with tf.device(server):
                        asked.append(tf.no_op())
                with tf.compat.v1.Session(master, config=config) as session:
                    session.run(asked)
        except tf.errors.OpError as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_secs)
    if thread.is_alive():
        raise ConnectionError(
            f"the parameter servers {', '.join(servers)} have not all answered "
            f"within {timeout_secs:g} s: start a tf.distribute.Server, with "
            "tfswitch imported, for each"
        )
    if errors:
        raise ConnectionError(
            f"the parameter servers {', '.join(servers)} do not answer: "
            f"{errors[0]}"
        ) from errors[0]
