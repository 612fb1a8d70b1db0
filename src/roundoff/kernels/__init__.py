"""Triton kernels, one file a kernel.

Importing this package imports nothing else; importing one of its modules needs Triton.
"""
