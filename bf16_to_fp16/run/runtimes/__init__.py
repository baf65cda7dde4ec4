"""Other people's runtimes: a checkpoint exported the way each wants it, run there in fp16, and what really computed it.

A runtime that is asked for fp16 may compute in fp32 all the same, where the processor or the library has no kernel.
Then finite outputs prove nothing, so each runtime here also says in which format its operations ran.
"""
