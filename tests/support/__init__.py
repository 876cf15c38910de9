"""Stand-ins for GPUs, graphs and NCCL on a CPU, which the tests share with the rehearsal of the GPU lane."""
