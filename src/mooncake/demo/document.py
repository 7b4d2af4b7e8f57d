"""The long document that the demo's instances read, and the question asked about it.

Over 1,500 tokens of SmolLM2's, about a place that does not exist, so that an answer can only come from the text.
"""

HANDBOOK = """\
OPERATIONS HANDBOOK OF THE SKARVEN TIDAL POWER STATION
Seventh edition, for the crew on shift

1. The station
Skarven stands across the mouth of a narrow fjord. A stone dam of four hundred metres holds back the tide, and \
twelve turbines in the dam turn it into current, first as the water comes in and six hours later as it leaves. On a \
calm spring tide the station feeds some nine thousand homes; on a neap tide in summer hardly half of that. The \
control room is on the third floor of the old pilot house, on the seaward side, because the first director wished \
that whoever decides about the gates should see the water and not only the figures. The workshop, the store and the \
boat shed are on the landward side. There is one road, and it is under water twice a day for about forty minutes; \
the times are chalked on the board beside the front door every Sunday evening.

2. The crew
Five people are on shift at any hour: a shift leader, two operators, a mechanic and a boatman. A shift lasts eight \
hours and begins at six, at two and at ten. Nobody leaves before the person who follows has read the log aloud and \
signed below the last entry. The shift leader may hand over the desk to an operator for meals, but never for longer \
than thirty minutes and never while a gate is moving. The boatman answers to the harbour office of the town and not \
to the station, and may refuse any trip without giving a reason. New members of the crew walk with each of the other \
four for one week before they are counted as part of a shift.

3. The gates
There are six gates, numbered from the north shore. Gates one to four are steel and close in eleven minutes. Gates \
five and six are the old oak gates; they close in twenty-six minutes and must be wetted with the hand pump if they \
have stood open for longer than three days, or the planks shrink and leak. A gate is moved by one operator, who \
calls the number, the direction and the opening in tenths, and a second person, who repeats it and only then frees \
the brake. If the two differ in a single word, the gate stays where it is and the call begins again. No gate moves \
while a boat is within two hundred metres on either side; the lamp on the pier head is then red, and the boatman \
alone may turn it green.

4. The turbines
Each turbine has a plate with its year on it. The eight from the east works run at ninety-four turns a minute and \
bear sudden loads well; the four later ones run faster, at one hundred and twelve, and must be given three minutes \
between standstill and half load. Bearing oil is read at the start of every shift. Above seventy degrees the load is \
lowered by a third; above eighty-two degrees the turbine is taken off the grid and its intake closed, whatever the \
market pays at that hour. Turbine nine hums at half load. It has done so since it was built, three surveys have \
found nothing, and there is no need to write it into the log. A hum from any other machine is written down with the \
hour, the load and the height of the water.

5. Seals, eels and nets
From the first of March to the tenth of May eels come up the fjord at night. During these weeks turbines one and \
two, which lie nearest to the eel ladder, stand still from dusk to dawn. A seal in the intake basin is reported to \
the marine station in Holmvik, which sends two people and a cage; until they have come, the basin's gate stays open \
by at least three tenths so that the animal can leave as it came. Fishing nets are found in the racks after every \
storm. They are cut free by the mechanic, laid out behind the boat shed and kept for thirty days, since most of them \
are missed by somebody.

6. Storm
A storm watch begins when the barometer in the hall falls by more than six points within three hours, or when the \
lighthouse at Ytre Skarv raises two black balls. The shift leader then calls the leader of the next shift, who comes \
at once and sleeps in the station. Gates five and six are closed first because they are slow. Loose wood on the dam \
is tied down, the crane is turned into the wind and its hook fastened to the ring in the floor. Once waves reach the \
white line on the pier nobody walks on the dam, alone or with others, for any reason at all. If the line to the \
mainland is lost, the station keeps turbine three running for its own needs and stops the others one by one, from \
the south, with two minutes between them.

7. Fire and flood
The bell has two voices. A quick ring means fire: everybody but the shift leader goes to the boat shed and is \
counted there by the mechanic. A slow ring means water in the turbine hall: the mechanic starts the two pumps on the \
upper gallery, and the operators close the intakes of all turbines that stand. The pumps run on diesel and have fuel \
for nineteen hours; spare cans are in the locker painted yellow, whose key hangs in the control room behind the \
clock. After any flood the insulation of every cable below the second stair is measured before a machine is started \
again, and the figures are sent to the chief engineer, Ingrid Solheim, who alone may allow the start.

8. Visitors
Schools may come on Tuesdays, at most twenty children with two teachers. They see the model in the hall, the eel \
ladder and, if no gate is moving, the gallery above turbine four. Visitors wear the orange helmets and the crew the \
blue ones, so that everybody can see at a glance who knows the way out. The cook bakes waffles on these days, and \
it is an old custom of the house that the youngest visitor may sound the horn at noon.

9. The log
The log is a bound book, never loose sheets, and is written in ink. Every entry begins with the hour and the height \
of the water on both sides of the dam. What was seen comes first, what was done comes second, and what somebody \
thinks about it comes last or not at all. A wrong word is struck out with one line so that it can still be read. When \
a book is full it goes to the cellar of the town library, where the oldest one, from the year the dam was begun, may \
be looked at on request. The log is the property of whoever is on shift: a director who wants to read it comes to \
the control room and asks.

10. Stores
Ordinary parts are ordered by the mechanic on the last Friday of the month. Three things are never allowed to run \
out: bearing oil, of which two drums must stand unopened; shear pins for the gates, of which forty must lie in the \
tin beside the brake; and coffee. The lift in the old pilot house carries six hundred kilograms and is inspected in \
April. Oak planks for gates five and six are sawn in the valley and dried for two years behind the store, under a \
roof, with a finger's breadth of air between them. Whoever takes the last plank of a stack tells the shift leader on \
the same day, since the sawmill only cuts oak in winter.

11. Calls from the grid
The grid office in the city may ask for more load or for less by telephone, and says a word of the day that is \
changed at midnight. Without the word nothing is done. Load is raised in steps of one turbine every two minutes, \
beginning in the middle of the dam, and lowered in the reverse order. If the office asks for full load during an eel \
week, the answer is no, and the name of the caller is written into the log. Four times a year the station starts \
from darkness as a trial: the mainland line is opened, turbine three is brought up by hand with the help of the \
small battery in the hall, and the others follow once its voltage has been steady for ten minutes.
"""

QUESTION = "What is the name of the chief engineer?"


def chat() -> list[dict[str, str]]:
    """The conversation that is sent to every instance."""
    return [{"role": "user", "content": f"Read this handbook.\n\n{HANDBOOK}\n{QUESTION}"}]
