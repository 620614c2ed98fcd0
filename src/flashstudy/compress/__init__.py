"""From a checkpoint to the models that are run; ignorant of timing."""
