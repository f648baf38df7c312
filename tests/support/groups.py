"""An engine's stream of groups as the list that tests compare."""

from __future__ import annotations

from collections.abc import AsyncIterator

from axolotl.serving.wire import Group


async def all_groups(stream: AsyncIterator[Group]) -> list[Group]:
    """All groups, in the order of their prompts."""
    return sorted([group async for group in stream], key=lambda group: group.index)
