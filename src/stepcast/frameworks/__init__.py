"""The catalogue of frameworks: what software decides, and what it takes where a user says nothing."""
