"""Prompts of several kinds and passages of prose, written for the gallery (MIT, as the rest)."""

from __future__ import annotations

import itertools

from ..arguments import check_whole

__all__ = ["PASSAGES", "prompts"]

#: Eight passages of plain prose, about a hundred words each.
PASSAGES = (
    "A lighthouse keeper kept two books. In the first he wrote what the rules asked for: the hour "
    "of lighting, the oil used, the ships that passed. In the second he wrote what he saw: a seal "
    "asleep on the lower steps, a cloud shaped like a plough, the sound of the fog signal when the "
    "wind turned. When the light was made automatic, the harbour office collected the first book "
    "and filed it. The second stayed in a drawer of the kitchen, where his granddaughter found it "
    "forty years later and learned from it when the terns used to arrive.",
    "Bread rises because yeast eats sugar and gives off carbon dioxide. Flour holds two proteins "
    "that join into gluten when water is added, and kneading stretches the gluten into sheets that "
    "trap the gas. Salt slows the yeast and tightens the sheets. A warm kitchen makes dough rise "
    "fast, a cold one makes it rise slowly and taste better, since bacteria have time to form "
    "acids. In the oven the gas expands, the water turns to steam, and the outside dries into a "
    "crust before the inside is done.",
    "The first railways kept the time of the town they started from. A traveller going west set "
    "his watch back by a few minutes at each large station, and a timetable had to say which clock "
    "it meant. Two trains on one track could believe that they had different hours to themselves. "
    "Companies therefore agreed on one time for a whole line, sent it along the telegraph each "
    "morning, and put up station clocks with two minute hands, one for the town and one for the "
    "trains. Within a generation the towns took the second hand down.",
    "To measure the height of a tree without climbing it, wait for a sunny day. Put a stick of one "
    "metre upright into the ground and measure its shadow. Then measure the shadow of the tree, "
    "from the middle of the trunk to the tip. The tree is as many times taller than the stick as "
    "its shadow is longer. The ground has to be level, and both shadows should be measured within "
    "a few minutes, because the sun moves. In winter the shadows are long and the errors small; at "
    "noon in June they are short, and an error of a hand is an error of a metre.",
    "A program that sorts a million names can be written in ten lines, and most of what one needs "
    "to know about it fits on a page. It compares two names, decides which comes first, and does "
    "so about twenty million times. What does not fit on the page is what a name is. Some are "
    "written in two alphabets. Some begin with a particle that one country sorts by and another "
    "ignores. Some have changed. The list that leaves the program is in order, and the person who "
    "looks for a friend in it may still not find her.",
    "Rivers do not run straight for long. Where the current touches the outer bank it is fast and "
    "takes soil away; along the inner bank it is slow and leaves soil behind. A small bend "
    "becomes a large one, and a large one becomes a loop with a narrow neck. In a flood the water "
    "cuts through the neck, and the loop is left beside the river as a lake in the shape of a "
    "sickle. From the air a valley shows dozens of them, old and new, and one can read from them "
    "where the river has been.",
    "The committee met on Tuesday to decide about the bench. It had stood in front of the library "
    "for thirty years, and it needed new boards. One member wanted oak, which is strong and "
    "expensive. One wanted plastic, which is neither. The treasurer asked who sits there, and "
    "nobody knew. So they went outside. On the bench sat a man who waited for a bus, and beside "
    "him a girl who read. They were asked. The man said that any board would do. The girl said "
    "that it should be warm in winter. The committee voted for oak.",
    "Sound travels through air at about 340 metres in a second, through water four times as fast, "
    "and through steel fifteen times. This is why someone with an ear on the rail hears a train "
    "before anybody else does, and why whales can talk over a distance at which we could not see "
    "a ship. A thunderstorm gives a simple measurement: count the seconds between the flash and "
    "the thunder and divide them by three. The result is the distance in kilometres, a little too "
    "small on a hot day and a little too large on a cold one.",
)

_PROMPTS = {
    "question": (
        "What is the capital of France?",
        "Why is the sky blue?",
        "Which planet has the most moons, and how many of them have names?",
        "What is the difference between a virus and a bacterium?",
        "How far away is the Moon?",
        "Who wrote the first computer program?",
        "Is a tomato a fruit or a vegetable?",
        "What happens to water when it freezes?",
    ),
    "explanation": (
        "Explain to a child why ships made of steel do not sink.",
        "Explain how a bicycle stays upright.",
        "What is inflation, and why do prices rise?",
        "Explain the difference between weather and climate.",
        "How does a refrigerator make things cold?",
        "Explain what a prime number is and why there are infinitely many.",
    ),
    "story": (
        "Write a short story about a clock that runs backwards.",
        "Tell a story about two neighbours who share one garden.",
        "Write the beginning of a detective story that takes place on a night train.",
        "Write a poem about the first snow of the year.",
        "Write a dialogue between a painter and a mathematician about the colour blue.",
    ),
    "code": (
        "Write a Python function that says whether a word is a palindrome.",
        "Write a Python function that returns the n-th Fibonacci number.",
        "Explain what this does: `sorted(words, key=len, reverse=True)[:3]`",
        "Write a SQL query that counts the orders of each customer in 2024.",
        "How do I read a text file line by line in Python?",
    ),
    "list": (
        "List five things to check before a long journey by car.",
        "Give me a recipe for pancakes.",
        "Plan a day in Lisbon for someone who likes to walk.",
        "Name ten animals that live in the desert.",
    ),
    "summary": tuple(
        f"Summarise this text in two sentences:\n\n{PASSAGES[i]}" for i in (0, 2, 4, 6)
    ),
}


def prompts(count: int = 32) -> list[tuple[str, str]]:
    """Prompts for a chat model, of six kinds in turn, so that the first few are of several kinds.

    Parameters
    ----------
    count : int, default 32
        How many, up to 32: eight questions, six explanations, five stories, five about code, four
        lists, and four summaries of a passage.

    Returns
    -------
    list of (str, str)
        Kind and text.

    Raises
    ------
    ArgumentError
        When *count* is no whole number up to 32.

    Examples
    --------
    >>> [kind for kind, _ in prompts(4)]
    ['question', 'explanation', 'story', 'code']
    """
    turns = [
        (kind, text)
        for texts in itertools.zip_longest(*_PROMPTS.values())
        for kind, text in zip(_PROMPTS, texts, strict=True)
        if text
    ]
    return turns[: check_whole("count", count, 0, len(turns))]
