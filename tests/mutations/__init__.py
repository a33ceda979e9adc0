"""What the tests protect: a kit that breaks the library in one place at a time, and sees whether a test fails."""
