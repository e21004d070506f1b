"""What estimates are worth, judged on measurements: the sections of ``tessera bench estimator``."""
