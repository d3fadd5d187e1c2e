"""vLLM as a rollout engine: a client of its server, and what runs inside its worker process.

``engine``, ``client``, ``server`` and ``verification`` run beside the trainer and need nothing of vLLM. ``worker``, ``transfer``,
``served`` and ``fresh`` are loaded by vLLM (``--worker-extension-cls``) and import it inside functions; of halfbyte they use
``refit`` and nothing that needs more than torch, numpy, xxhash and zstandard.
"""
