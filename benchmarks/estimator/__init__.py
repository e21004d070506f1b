"""The sections of ``tessera bench estimator``, which compare estimates with measurements."""
