"""KV cache straight from a prefill to a decode instance: decode says where it wants a prompt's blocks, prefill pushes
them there layer by layer while it still computes.

    decode's scheduler ── Pull ──► decode's worker ── Ask ──► prefill's worker ◄── Share ── prefill's scheduler
        planning                   pulls, links               serving, pushes,              planning
                                                              transfers, copies, stepping

plan       what the halves tell each other       wire       what the workers tell each other
geometry   where a block's bytes lie             registry   who the workers of a prefill instance are
heads      which rank sends which heads          site       where a worker stands
routes     from our bytes to a peer's            worker     what a worker owns

The rule that keeps decode's memory its own: prefill writes only within a lease that decode renews (see `wire`), and
decode lets go of blocks only when prefill has said that it writes no more, is known dead, or its lease is over.
"""
