"""What a load did not bring is computed, whatever vLLM's policy for failed loads."""

from typing import Any


def compute_from(request: Any, tokens: int) -> bool:
    """Have vLLM compute what is behind the first `tokens` of a request whose load, which brought no more, is about to
    be over.  True if its next start shall find nothing cached: `skip_reading_prefix_cache` is to be reset once it has
    started.

    The request still waits, and vLLM reads its number of computed tokens next when that is over.  So it needs no
    failure policy, and nothing but what is missing is computed again.
    """
    request.num_computed_tokens = min(request.num_computed_tokens, tokens)
    if request.num_computed_tokens or request.skip_reading_prefix_cache:
        return False
    # It starts anew, in the blocks it has: it must not be given cached ones beside them.
    request.skip_reading_prefix_cache = True
    return True
