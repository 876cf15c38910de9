"""What several tests share: one line per file, with its users.

==================  ====================================================================================================
ranks               ``@on_ranks``: a test's body on every rank; what all ranks have: nearly every distributed test
harness             `World`: processes that stay alive between tests, or are fresh for one: the fixtures of conftest.py
worker              a rank of `World.run_fresh`, and how it leaves a group: harness, test_process_groups
fork_server         lets the forked ranks, and the programs below, import `tests`: harness, faulty_rank, elastic_rank
gpu_worker          a rank on a shared GPU or in its rehearsal (``GRADWIRE_TESTS_ON``): harness, test_feature_pairs
training            `HOOKS`, both DDPs, `wrapped`, `train`, faults, `error_of`: hooks, reducer, faults, comm, cli
states              the hook states, `Training`, `Ledger` (law 1), checkpoints: hooks, reducer, faults
zoo                 small models that a reducer may get wrong; `Probe`, whose gradients are its inputs: training, hooks
features            models, plans and options of DDP's features, parity with PyTorch: reducer, test_errors
fault_schedules     trainings with random faults, and what holds at their end: test_faults, test_sharded_faults
powersgd_steps      steps of PowerSGD on chosen gradients: the files test_powersgd*, test_simple_examples
sharded             a model sharded by FSDP2, and its exact gradients: sharded
sequences           random sequences of events, and the hooks that they are drawn with: test_random_sequences
sequence_events     the events of random sequences: sequence_training, test_random_sequences
sequence_training   a run of a random sequence on a rank, with laws: test_random_sequences
fast_interpreter    Triton's interpreter in two thirds of the time: fork_server, tests/kernels
bits                assertions about bitwise equal results: everywhere
rehearsal           the code path of a GPU on CPU tensors, NCCL's rules over gloo: test_replays, test_nccl_rules, bench
rehearse            ``make gpu-rehearsal``, a program
happens_before      finds races of streams and freed memory, on a double of a GPU: test_stream_executor, test_gpu_path
gpu_scenarios       training on that double, with all that may happen in between: test_gpu_path
faulty_run          starts ranks of faulty_rank, and checks their steps: tests/faults
faulty_rank         a rank that meets a fault, a program: faulty_run
elastic_rank        a worker that kills itself, a program: test_elastic
stopped             a command that gets a signal while its ranks run: test_demo
example_programs    the commands in examples/: project/test_examples, integrations/test_examples, test_simple_examples
recipe              ``save`` and ``load`` of docs/checkpointing.md: test_checkpoint_recipe, elastic_rank
keep_checkpoints    writes tests/checkpoints for a release, a program: test_kept_checkpoints reads them
pairwise            which cases of large grids are slow: tests/conftest.py, test_pairwise
==================  ====================================================================================================
"""
