"""Small models, rows and processes that several tests share."""
