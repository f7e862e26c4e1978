"""A reward that no two completions of a random model share, so that every group has a gradient."""


def odd_tokens(completion_ids, **columns):
    return [sum(int(token) % 2 for token in ids) / max(1, len(ids)) for ids in completion_ids]
