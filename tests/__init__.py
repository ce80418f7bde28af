"""Tests of the library, the processes they run on, and the tiny models they share."""
