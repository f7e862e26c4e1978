"""The characters of hypothesis' st.text(), whose own search for those that UTF-8 has costs a new checkout a second."""

from hypothesis import strategies as st

CHARACTERS = st.characters(exclude_categories=["Cs"])  # surrogates: all that UTF-8 does not have
