"""Second definitions, slow and plain, that tests compare the product with."""
