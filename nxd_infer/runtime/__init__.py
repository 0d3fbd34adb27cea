"""Run an artifact: TensorParallelModel and RankModel, their rank processes, weight updates."""
