"""Built-in platforms and providers. Each module is a plugin like those of others: ``register(api)``.

Code for hardware that this project has not run on is import-guarded, exercised against a stub device in
``tests/unit/platform/test_plugins.py``, and shown as untested by ``hetero-megatron plugins list``.
"""
