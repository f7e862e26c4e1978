"""The sentences of the word problems: what is said, and which one operation answers it.

Placeholders: {name}, {he}, {He} and {other} are people; {a} and {b} are the numbers of the operation, a first, in
whichever order the text tells them; {a_things} is "1 apple" or "3 apples", {things} the plural and {thing} the singular
of what is counted, {box} and {boxes} what it lies in; {a_are} is "is" or "are"; a few units have forms of their own.
A template's place in this list never enters anything: its name does, and decides with the numbers what is held out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """Template("spend", "change", "-", "{name} has …"): its name, its kind, its operation, its text."""

    name: str
    kind: str
    operation: str  # one of + - * /
    text: str


NAMES = (
    *(("Anna", "she"), ("Ben", "he"), ("Carla", "she"), ("David", "he"), ("Emma", "she"), ("Felix", "he")),
    *(("Grace", "she"), ("Henry", "he"), ("Isabel", "she"), ("Jack", "he"), ("Karen", "she"), ("Leo", "he")),
    *(("Mia", "she"), ("Noah", "he"), ("Olivia", "she"), ("Paul", "he"), ("Rosa", "she"), ("Sam", "he")),
    *(("Tina", "she"), ("Victor", "he")),
)
THINGS = (
    *(("apple", "apples"), ("book", "books"), ("cherry", "cherries"), ("coin", "coins"), ("cookie", "cookies")),
    *(("flower", "flowers"), ("marble", "marbles"), ("muffin", "muffins"), ("peach", "peaches"), ("pen", "pens")),
    *(("pencil", "pencils"), ("shell", "shells"), ("stamp", "stamps"), ("sticker", "stickers"), ("toy", "toys")),
    *(
        ("brush", "brushes"),
        ("candy", "candies"),
        ("knife", "knives"),
        ("leaf", "leaves"),
        ("strawberry", "strawberries"),
    ),
)
BOXES = (("bag", "bags"), ("basket", "baskets"), ("box", "boxes"), ("jar", "jars"), ("tray", "trays"))

TEMPLATES = (
    # addition
    Template("buys", "add", "+", "{name} has {a_things} and buys {b} more. How many {things} does {name} have now?"),
    Template(
        *("puts", "add", "+"),
        "There {a_are} {a_things} in a {box}. {name} puts in {b} more. How many {things} are in the {box} now?",
    ),
    Template(
        *("picks", "add", "+"),
        "{name} finds {a_things} in the morning and {b} in the afternoon. How many {things} does {he} find in all?",
    ),
    Template("both", "add", "+", "{name} has {a_things} and {other} has {b}. How many {things} do they have together?"),
    # subtraction
    Template(
        *("gives", "subtract", "-"),
        "{name} has {a_things} and gives {b} of them to {other}. How many {things} does {name} have left?",
    ),
    Template(
        *("takes", "subtract", "-"),
        "There {a_are} {a_things} on the table. {name} takes {b} away. How many {things} are left on the table?",
    ),
    Template(
        "loses", "subtract", "-", "{name} had {a_things} but lost {b} of them. How many {things} does {he} still have?"
    ),
    Template("sells", "subtract", "-", "A shop has {a_things} and sells {b} of them. How many {things} remain?"),
    # equal groups
    Template(
        *("boxes", "multiply", "*"),
        "{name} has {a_boxes} with {b_things} in each {box}. How many {things} does {he} have altogether?",
    ),
    Template("guests", "multiply", "*", "{a} guests get {b_things} each. How many {things} are that in total?"),
    Template("pages", "multiply", "*", "{name} reads {b} pages every day. How many pages does {he} read in {a} days?"),
    Template(
        *("rows", "multiply", "*"),
        "A garden has {a} rows of trees with {b} trees in each row. How many trees are in the garden?",
    ),
    Template(
        *("times", "multiply", "*"),
        "{name} has {b_things}. {other} has {a} times as many. How many {things} does {other} have?",
    ),
    # sharing: how much does each get
    Template(
        *("friends", "share", "/"),
        "{name} shares {a_things} equally among {b} friends. How many {things} does each friend get?",
    ),
    Template(
        *("filled", "share", "/"),
        "{name} puts {a_things} into {b_boxes}, the same number into each. How many {things} are in one {box}?",
    ),
    Template(
        *("teams", "share", "/"),
        "A teacher divides {a} children into {b} equal teams. How many children are in each team?",
    ),
    # grouping: how many groups
    Template(
        *("needs", "group", "/"),
        "{name} has {a_things} and puts {b} of them into each {box}. How many {boxes} does {he} need?",
    ),
    Template(
        "weeks", "group", "/", "{name} saves {b_dollars} a week. How many weeks does {he} need to save {a} dollars?"
    ),
    Template("cars", "group", "/", "A car takes {b} children. How many cars are needed for {a} children?"),
    # comparing
    Template(
        *("more", "compare", "-"),
        "{name} has {a_things} and {other} has {b}. How many more {things} does {name} have than {other}?",
    ),
    Template(
        *("fewer", "compare", "-"),
        "{name} has {b_things} and {other} has {a}. How many fewer {things} does {name} have than {other}?",
    ),
    Template(
        *("ropes", "compare", "-"),
        "A red rope is {a_meters} long and a blue rope is {b_meters} long. "
        "How many meters longer is the red rope than the blue rope?",
    ),
    Template(
        *("others", "compare", "+"),
        "{name} has {a_things}. {other} has {b} more than {name}. How many {things} does {other} have?",
    ),
    # money
    Template("costs", "money", "*", "One {thing} costs {b_dollars}. How many dollars do {a_things} cost?"),
    Template("pays", "money", "*", "{name} buys {a_things} for {b_dollars} each. How many dollars does {he} pay?"),
    Template("earns", "money", "*", "{name} earns {b_dollars} an hour. How many dollars does {he} earn in {a} hours?"),
    Template(
        *("prices", "money", "+"),
        "A hat costs {a_dollars} and a scarf costs {b_dollars}. How many dollars do they cost together?",
    ),
    Template(
        *("bill", "change", "-"),
        "{name} buys a ball for {b_dollars} and pays with {a_dollars}. How many dollars does {he} get back?",
    ),
    Template(
        *("spends", "change", "-"),
        "{name} has {a_dollars} and spends {b} of them on lunch. How many dollars does {he} have left?",
    ),
    # time
    Template(
        *("practice", "time", "+"),
        "{name} plays the piano for {a_minutes} on Monday and {b_minutes} on Tuesday. "
        "How many minutes does {he} play in total?",
    ),
    Template(
        *("journey", "time", "+"),
        "A bus ride takes {a_minutes} and the walk after it takes {b_minutes}. How many minutes does the way take?",
    ),
    Template(
        *("rest", "time", "-"),
        "A film is {a_minutes} long. {name} has watched {b_minutes} of it. How many minutes are left?",
    ),
    # ages
    Template("older", "age", "+", "{name} is {a_years} old and {other} is {b_years} older. How old is {other}?"),
    Template("younger", "age", "-", "{name} is {a_years} old and {other} is {b_years} younger. How old is {other}?"),
    # a part that is not told
    Template(
        *("found", "missing", "-"),
        "{name} had {b_things}. {He} found some more and now has {a}. How many {things} did {he} find?",
    ),
    Template(
        *("party", "missing", "-"),
        "{name} needs {a_things} for a party and has {b} so far. How many more {things} does {he} need?",
    ),
)
