"""A decorator for functions that torch.compile leaves as they are.

`torch.compiler.disable` imports the compiler when a module is imported, which takes 1.9 s of a processor in each
evaluator and each command that needs no compiler. This decorator imports it at the first call.
"""

from torch._compile import _disable_dynamo as uncompiled

__all__ = ["uncompiled"]
