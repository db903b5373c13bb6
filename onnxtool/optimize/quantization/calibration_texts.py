"""Texts to calibrate on where the user has none: questions, news, code, recipes, law, letters, short and long."""

from __future__ import annotations

# One a line; a line that ends with a backslash goes on, and `\\n` is a line break within a text.
_TEXTS = """\
Yes.
train tickets to Lyon
How do I reset the password of my account?
cheap waterproof hiking boots size 43
What is the boiling point of ethanol at sea level?
The cat slept on the warm stones until the rain came.
who painted the ceiling of the opera in paris
Error 404: the page you were looking for has moved or never existed.
Interest rates were left unchanged for the third time in a row, the central bank said on Thursday.
def mean(values):\\n    return sum(values) / len(values)
SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY name ORDER BY 2 DESC;
Melt the butter, stir in the flour, and add the milk little by little until the sauce is smooth.
Patients with a history of kidney disease should have their dose reduced by half and be seen again after a week.
The defendant appealed, arguing that the contract had been signed under pressure and was therefore void.
Photosynthesis turns carbon dioxide and water into sugar and oxygen, with light as its source of energy.
Dear Ms Okafor, thank you for your letter of 3 March. We have refunded the full amount, 248.90 EUR, to your card.
Goal! Two minutes before the whistle the substitute headed the ball in at the near post: 2-1.
I bought this kettle in May and the lid broke in June. The shop never answered. One star.
Absolutely loved it; the second season is even funnier than the first!!!
Mount Kenya, an extinct volcano, has three peaks above 4900 metres, and glaciers that have shrunk for a century.
The function returns None if the key is missing, and raises a TypeError if the mapping is not hashable.
Turn left at the church, follow the river for two kilometres, and you will see the mill on your right.
7 + 5 * (3 - 1) = 17
In 1889 the tower was the tallest structure in the world, and most of its neighbours hated it.
Can dogs eat grapes
Quarterly revenue rose 12% to $4.3 billion, beating estimates, while margins slipped to 31.5% on higher shipping costs \
and a weaker yen.
To be patched at once: a crafted packet lets anyone on the same network read the memory of the router.
The string quartet opens with a slow fugue whose theme comes back, upside down, at the end of the last movement.
Please do not feed the ducks.
Hypothesis: seedlings that are watered at night grow faster. Result: no difference was found (n = 64, p = 0.41).
An induction motor has no brushes; the field of its stator drags the rotor along, always a little slower.
She closed the book, looked at the sea for a long while, and decided not to answer the telephone any more.
Flight BA 2490 to Geneva is delayed by approximately forty minutes because of fog; passengers are asked to stay near \
gate B12 and to listen to further announcements.
Wie spät ist es? Il est déjà midi. ¿De verdad?
The transformer reads all tokens of a sentence at once; attention weights say how much each of them matters for each \
other one, and a mask hides the padding.
git commit --amend --no-edit && git push --force-with-lease
Farmers in the north expect the smallest harvest of wheat since 1976. After a winter without snow and a spring without \
rain, the fields are bare by May, and prices at the port have doubled since January.
Unlike lists, tuples cannot be changed once they are made, which is why they can be used as keys of a dictionary, as \
long as everything inside them can be hashed as well.
vegan lasagne recipe no nuts
The committee, having considered the report of the working group and the comments received from member states, \
recommends that the deadline be extended to 31 December and that no further fees be charged until then.
A neutron star is what is left of a heavy star after its collapse: as massive as the sun, twenty kilometres wide, and \
spinning up to seven hundred times a second. A spoonful of it would weigh as much as a mountain.
Warning: keep out of reach of children. Do not use near open fire. Rinse with plenty of water after contact with the \
eyes.
He scored 3,401 runs at an average of 52.3 before a knee injury ended his career at thirty-one.
Is it cheaper to lease or to buy an electric car if I drive less than eight thousand kilometres a year?
The museum is open from Tuesday to Sunday, 10 a.m. to 6 p.m.; admission is free on the first Friday of the month. \
Guided tours in English start at eleven and at three, take about an hour, and must be booked in advance. Large bags, \
umbrellas and food have to be left in the lockers at the entrance.
https://example.org/docs/index.html#install
Once the server has accepted the connection, the client sends a header of eight bytes: two of a magic number, one of a \
version, one of flags, and four that hold the length of what follows, most significant byte first. A server that does \
not know the version answers with its own and closes the connection; a client may then try again with the older one. \
Neither side may wait for more than thirty seconds.
My grandmother kept bees behind the barn, and every summer she would send us out at dusk with a jar and a candle, so \
that we should learn not to be afraid. I was afraid every time. What I remember now is the sound, the wax on my \
fingers, and her voice in the dark, counting the hives as if they might have walked away during the day.
"""
CALIBRATION_TEXTS = tuple(text.replace("\\n", "\n") for text in _TEXTS.splitlines())
