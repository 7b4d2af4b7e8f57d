"""Calls about single replicas: copying and moving them as tasks, and clearing them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc.task_messages import Cleared, CopyTask, MoveTask, QueryTask, ReplicaClear, TaskCreated, TaskState
from mooncake.store.member import INVALID, Member, NotSetUpError
from mooncake.store.types import TaskStatus, TaskType

if TYPE_CHECKING:
    from mooncake.rpc.message import Message

TaskId = tuple[int, int]
NO_TASK: TaskId = (0, 0)


class QueryTaskResponse:
    """What is known of a task.  Times are milliseconds since the epoch."""

    def __init__(self, task: TaskId, state: TaskState) -> None:
        self.id = task
        self.type = TaskType(state.type)
        self.status = TaskStatus(state.status)
        self.created_at_ms_epoch = state.created_ms
        self.last_updated_at_ms_epoch = state.updated_ms
        self.assigned_client = state.client
        self.message = state.message

    def __repr__(self) -> str:
        return (
            f"QueryTaskResponse(id={self.id[0]}-{self.id[1]}, type={int(self.type)}, status={int(self.status)}, "
            f"created_at={self.created_at_ms_epoch}, last_updated_at={self.last_updated_at_ms_epoch}, "
            f'assigned_client={self.assigned_client[0]}-{self.assigned_client[1]}, message="{self.message}")'
        )


class Replicas(Member):
    """Segments go by the names of their stores (`get_hostname`)."""

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Have replicas of a value in these segments too: (task, 0), or ((0, 0), code): OBJECT_NOT_FOUND;
        INVALID_PARAMS for no or unknown targets; UNAVAILABLE_IN_CURRENT_STATUS for one that takes nothing now."""
        return self._create(CopyTask(key, list(targets)))

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Have a value's replica in `target` instead of in `source`: (task, 0), or ((0, 0), code) as create_copy_task;
        INVALID_PARAMS also if both are one, or none is in `source`."""
        return self._create(MoveTask(key, source, target))

    def query_task(self, task_id: TaskId) -> tuple[QueryTaskResponse | None, int]:
        """(what is known of the task, 0), or (None, TASK_NOT_FOUND).  Raises TypeError for what is no task's id."""
        if not isinstance(task_id, tuple) or len(task_id) != 2 or not all(isinstance(part, int) for part in task_id):
            raise TypeError(f"a task's id is two whole numbers, as create_copy_task gives them; not {task_id!r}")
        try:
            state = self._joined().rpc.call(QueryTask(task_id), TaskState)
        except NotSetUpError:
            return None, INVALID
        except StoreError as error:
            return None, int(error.code)
        return QueryTaskResponse(task_id, state), 0

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove values that this store wrote and on which there is no lease; with `segment_name` only their replicas
        there.  The keys of which something was removed."""
        try:
            return self._joined().rpc.call(ReplicaClear(list(keys), segment_name), Cleared).keys
        except (NotSetUpError, StoreError):
            return []

    def _create(self, request: "Message") -> tuple[TaskId, int]:
        try:
            client = self._joined()
            if client.config.is_dummy:
                return NO_TASK, INVALID
            return client.rpc.call(request, TaskCreated).task, 0
        except NotSetUpError:
            return NO_TASK, INVALID
        except StoreError as error:
            return NO_TASK, int(ErrorCode(error.code))
