r"""Gold answers of every kind with other notations of them, and wrong answers near to them; verdicts by hand.

A line holds: gold | what means the same ; … | what does not ; …
"""

# ruff: noqa: E501
from typing import NamedTuple

TABLE = {
    "number": r"""
72 | 72.0 ; 72.00 ; +72 ; $72$ ; 072 ; 144/2 ; \frac{144}{2} ; 72 clips ; **72** ; \text{72} ; \mathbf{72} ; x = 72 ; 72\text{ cm}^2 ; 72^\circ ; 72\% | 71 ; -72 ; 7.2 ; 720 ; 72.01 ; 72/2 ; \frac{7}{2} ; 2^{72} ; 72x ; 7, 2
2 | 2.0 ; \frac{4}{2} ; \sqrt{4} ; 4/2 ; (2) ; [2] | 1, 2 ; x > 2 ; y = 3x+2 ; 1 \le x < 2 ; \log_3 2 ; $2 billion ; 2 million ; \frac{7}{2} ; \frac{1}{2} ; x^2 ; 3\sqrt{2} ; 2x ; x + 2 ; 10 + 2 ; (1,2) ; \{1,2\} ; 2! + 1 ; 7/2
-5 | −5 ; -5.0 ; -\frac{10}{2} ; \text{-5} | 5 ; 10^{-5} ; 0.5 ; -50 ; x-5
1,234,567 | 1234567 ; 1{,}234{,}567 ; 1\,234\,567 ; 1,\!234,\!567 ; 1,234,567.00 ; 1.234567 \times 10^6 | 1,234,568 ; 1234 ; 567 ; 1.234567
1000000 | 1,000,000 ; 1~000~000 ; 1\ 000\ 000 ; 1 000 000 ; 1 000 000 ; 10^6 ; 10^{6} ; 1e6 ; 1 \times 10^{6} | 100000 ; 10^{5} ; 6
0.00001 | 1e-05 ; 1e-5 ; 10^{-5} ; 1 \times 10^{-5} ; \frac{1}{100000} ; 0.000010 | 0.000011 ; 0.00002 ; 10^{-6} ; 1.1 \times 10^{-5} ; 0 ; -5 ; 0.0001
1e-05 | 0.00001 ; 10^{-5} ; 1/100000 | 0.000012 ; 10^{-4} ; 1 ; 5
10^{-5} | 0.00001 ; 1e-5 ; \frac{1}{10^5} | 10^{5} ; -5 ; 0.000014 ; 10
1.2\times 10^{-3} | 0.0012 ; 1.2e-3 ; \frac{12}{10000} | 0.012 ; 1.2 ; 0.00121
265252859812191058636308480000000 | 265,252,859,812,191,058,636,308,480,000,000 | 265252859812191058636308480000001 ; 2.65252859812191 \times 10^{32} ; 29!
0.5 | .5 ; 1/2 ; \frac{1}{2} ; \frac12 ; \dfrac{1}{2} ; 0.50 ; 50% ; 2^{-1} | 0.05 ; 5 ; 1/3 ; -0.5 ; 0.51 ; 5%
\frac{1}{2} | 0.5 ; 1/2 ; \tfrac{1}{2} ; \frac{2}{4} ; .5 ; \frac 1 2 | \frac{7}{2} ; 2 ; 1 ; \frac{1}{3} ; \frac{2}{1} ; -\frac{1}{2} ; \sqrt{2} ; 12
0.\overline{3} | 1/3 ; \frac{1}{3} ; 0.3\overline{3} | 0.3 ; 0.33 ; 3 ; 0.\overline{4} ; 1/2
1/3 | \frac{1}{3} ; 2/6 | 0.333 ; 0.333333 ; 3 ; 1/4
-\frac{2}{3} | -2/3 ; \frac{-2}{3} ; -\dfrac{2}{3} | 2/3 ; -3/2 ; -0.67
1\frac{1}{2} | 1.5 ; 3/2 ; \frac{3}{2} ; 1 1/2 | 11/2 ; 0.5 ; 1/2 ; 1
3 1/4 | 3.25 ; 13/4 ; 3\frac{1}{4} | 31/4 ; 3/4 ; 3.4
50% | 50 \% ; 50\% ; 50 percent ; 50 ; 0.5 ; 1/2 | 5% ; 500% ; 0.05 ; 0.5% ; 51%
12.5\% | 12.5% ; 0.125 ; 1/8 ; 12.50 % | 125% ; 1.25 ; 12%
$18.00 | 18 ; \$18 ; $18 ; 18 dollars ; USD 18 ; 1800 cents | $81 ; €18 ; 18 euros ; $18.50 ; £18 ; 18 cents
€5 | 5 euros ; 5 € ; 5 ; €5.00 | $5 ; €50 ; 5 dollars ; £5
5 cm | 5cm ; 5\text{ cm} ; 5 ; 50 mm ; 0.05 m ; 5 centimeters ; 5.0 cm ; 5\,\mathrm{cm} | 5 m ; 5 mm ; 6 cm ; 50 cm ; 5 cm^2 ; 5 inches
12\text{ cm}^2 | 12 cm^2 ; 12 cm² ; 12 square cm ; 12 ; 12\text{ sq cm} ; 1200 mm^2 | 12 cm ; 12 m^2 ; 12 cm^3 ; 21 cm^2
60 km/h | 60 km per hour ; 60 ; 60\text{ km/h} ; 1 km/minute | 60 mph ; 60 m/s ; 6 km/h
90 minutes | 90 min ; 1.5 hours ; 90 | 90 hours ; 90 seconds ; 1.5 ; 9 minutes
30^\circ | 30° ; 30 degrees ; 30 ; 30^{\circ} ; 30\text{ degrees} | 60° ; 3° ; 30\pi
20 °C | 20 ; 20 degrees C ; 20^\circ\text{C} ; 20°C | 20 °F ; -20 °C ; 200
1.5 million | 1500000 ; 1,500,000 ; 1.5 \times 10^6 ; 1.5 Million | 1.5 billion ; 1.5 ; 15 million ; 150000
5 thousand | 5000 ; 5,000 ; 5 \times 10^3 | 5 ; 50000 ; 5 million
5 km | 5000 m ; 5 ; 5 kilometers | 5 miles ; 5000 ; 5 m
$2 billion | 2,000,000,000 ; 2 billion dollars ; $2000 million | $2 million ; 2 ; €2 billion
3 | 3rd ; 3 of them ; 6/2 ; \frac{9}{3} ; +3. | 3x ; 33 ; \frac{3}{2} ; 3^2 ; 3 + 1
72 clips | 72 ; 72 clips in all ; 72 red clips ; 72\text{ clips} | 73 clips ; 27 ; 72 kg ; 72 dollars ; 72 pens ; 72 %
12 apples | 12 ; 12 apples ; 12.0 apples ; 12 green apples ; 12\text{ apples} | 12 kg ; 12 dollars ; 12 pears ; €12 ; 12 cm
1 box | 1 ; 1 boxes ; 1.0 box | 1 bag ; 1 kg ; 2 boxes
The answer is 72. | 72 ; 72 clips | 71 ; 7 ; \frac{7}{72} ; x+72
2^{100} | 2^100 ; 4^{50} ; 1267650600228229401496703205376 | 100 ; 2 ; 2^{99} ; 2^{10} ; 200
10011_2 | 10011_{2} ; 10011 | 10011_3 ; 19 ; 2 ; 10010_2
3:2 | 6:4 ; 3/2 ; 1.5 ; 3 : 2 ; \frac{3}{2} | 2:3 ; 3:4 ; 2 ; 6:2
2 \times 3 | 6 ; 2x3 ; 2 × 3 ; 2 \times 3 | 3 \times 2 ; 3x2 ; 5
7 red balls | 7 ; 7 balls ; 7 Red Balls ; 7 red ball ; 7 big red balls ; 7 red balls that he bought ; 7 balls in total ; 7 more balls ; 7 of the red balls | 7 blue balls ; 7 red cubes ; 7 red apples ; 7 large blue balls ; 7 not red balls ; 7 kg ; 8 red balls
4 large boxes | 4 ; 4 boxes ; 4 large box ; 4 very large boxes | 4 small boxes ; 4 large bags ; 4 large crates ; 4 bags
7 red and blue balls | 7 balls ; 7 blue and red balls ; 7 blue balls | 7 red and white balls ; 7 red and blue cubes
5 apples | 5 green apples ; 5 apples each ; 5 apples and a pear | 5 apple pies ; 5 pineapples ; 5 pears
5 apple pies | 5 pies ; 5 apple pie | 5 apples ; 5 cherry pies
3 bags of rice | 3 bags ; 3 rice bags ; 3 small bags of rice | 3 bags of beans ; 3 cups of rice ; 3 rice
5 kg of apples | 5 kg ; 5 kilograms of apples ; 5000 g of apples ; 5 kg of red apples | 5 kg of pears ; 5 apples ; 5 g of apples
3 more apples | 3 ; 3 apples ; 3 more | 3 fewer apples ; 3 more pears
3rd floor | 3 ; 3rd ; 3rd floor | 3rd street ; 4th floor ; 3 floors
2 million people | 2 million ; 2,000,000 people ; 2000000 | 2 million cars ; 2 million dollars ; 2 billion people ; 2 people
5 dozen eggs | 5 dozen ; 5 dozen eggs | 5 dozen roses ; 5 eggs ; 5 bags
50% of the students | 50% ; 0.5 ; 50 ; 50 percent of students | 50% of the teachers ; 50 students ; $50
20% | 20 percent ; 20 per cent ; 0.2 ; 20 | 20 dollars ; $20 ; 20 kg ; 20 ‰ ; 20 apples
100 degrees Fahrenheit | 100 ; 100°F ; 100 degrees ; 100 F ; 100° Fahrenheit ; 100 Fahrenheit | 100 degrees Celsius ; 100°C ; 100 C ; 100 celsius ; 100 kelvin
20 degrees Celsius | 20°C ; 20 °C ; 20 degrees centigrade ; 20 degrees | 20°F ; 20 F ; 20 degrees Fahrenheit
$5 per hour | 5 ; $5 ; $5/hour ; $5 an hour ; 5 dollars per hour ; $5.00 per hour ; 5 per hour ; $5 every hour ; $5/hr | 5 euros per hour ; €5 per hour ; €5 ; $5 per day ; $6 per hour ; 5 hours ; 5 kg per hour
$3 per pound | $3 ; $3/lb ; 3 dollars per pound | $3 per kilogram ; €3 per pound ; 3 pounds
60 miles per hour | 60 ; 60 mph ; 60 miles/hour ; 60 miles an hour ; 1 mile per minute | 60 kilometers per hour ; 60 km/h ; 60 miles per minute ; 60 miles per gallon
3 apples per child | 3 ; 3 apples ; 3 per child ; 3 apples each ; 3 apples for each child | 3 pears per child ; 3 apples per adult ; 3 apples per day
5 Canadian dollars | 5 ; $5 ; 5 dollars ; 5 CAD | 5 Australian dollars ; 5 US dollars ; 5 USD ; €5
$5 | 5 US dollars ; US$5 ; 5 USD ; $5 USD ; 5 dollars each | 5 pounds ; £5 ; 5 pesos ; 5% ; ¥5
£5 | 5 pounds ; 5 GBP ; 5 | 5 lbs ; $5 ; 5 euros
5 m tall | 5 m ; 5 meters tall ; 5 | 5 m wide ; 5 km tall
10 cm^2 | 10 cm² ; 10 square centimetres ; 10 centimeters squared | 10 cm^3 ; 10 cm ; 10 cubic centimeters ; 10 in^2
8 ounces | 8 oz ; 8 oz. ; 8 ounce | 8 pounds ; 8 grams
5 inches | 5 in ; 5 in. ; 5 inch | 5 feet ; 5 cm
5 g | 5g ; 5 grams ; 0.005 kg | 5kg ; 5 mg ; 5m
5 kg | 5 kilos ; 5 kgs ; 5 Kilograms | 5 g ; 5 km ; 5 lb
12 marbles | 12 ; 12 red marbles ; 12 marbles in all | 12 coins ; 12 decks ; 12 kg
3 decades | 3 ; 3 decades ago | 3 days ; 3 novels
24 square units | 24 ; 24 sq units ; 24 units^2 ; 24\text{ units}^2 ; 24 units squared | 24 units ; 24 cubic units ; 24 cm^2
3/4 of an hour | 3/4 hour ; 45 minutes ; 3/4 | 3/4 of a day ; 3/4 mile ; 3/4 of a minute
3/4 mile | 3/4 of a mile ; 0.75 miles | 3/4 of an hour ; 3/4 of a km
4 hours | 4 full hours ; 4 hours per day ; 4 straight hours | 4 full minutes ; 4 extra days ; 4 minutes per day
2 liters | 2 liters of water per hour ; 2 liters per day ; 2 liters a day | 2 gallons per day ; 2 liters per hour
60 miles | 60 miles per day ; 60 whole miles | 60 miles per hour ; 60 mph ; 60 km per day
12 boxes | 12 red and blue boxes ; 12 large and heavy boxes | 12 bags and boxes ; 12 men and big boxes
3/5 of the students | 60% of the students ; 3/5 | 60% of the teachers ; 3/5 of the class
6 feet tall | 6 feet high ; 6 ft | 6 feet wide ; 6 inches high
$5 a kg | $5 per kg ; $5 ; $5/kg | $5 a lb ; €5 a kg
10 polka-dot blankets | 10 ; 10 blankets ; 10 polka dot blankets | 10 polka-dot pillows ; 10 striped blankets
8 cones | 8 ice-cream cones ; 8 cones | 8 ice-cream trucks
5 t-shirts | 5 ; 5 T-shirts | 5 x-rays ; 5 pants
762 M&M's | 762 ; 762 red M&M's | 762 Skittles
5 children's books | 5 books ; 5 | 5 children's toys ; 5 children
3 times | 3 ; 3 times as much | 3 hours ; 3 apples""",
    "letter": r"""
B | (B) ; \text{B} ; \text{(B)} ; \textbf{(B)} ; b ; B. ; B) ; **B** ; \mathrm{B} ; (B) Paris ; B. 42 ; B) x + 1 ; (b) | A ; C ; (A) ; AB ; D. 42 ; A) B ; BB ; 8 ; beta
(B) | B ; \text{B} ; (b) ; B. ; \text{(B)} ; \mathbf{B} | (C) ; A ; \text{(D)} ; (AB) ; \frac{B}{2}
\text{(C)} | C ; (C) ; \text{C} ; C. ; \textbf{(C)} | B ; (D) ; 3 ; CC
d | D ; (d) ; \text{d} ; (D) ; \textbf{(d)} | c ; (c) ; e ; dd""",
    "time": r"""
3:45 | 03:45 ; 3:45 PM ; \text{3:45} ; 3:45 p.m. | 7:45 ; 3:54 ; 45 ; 3 ; 1:15 ; 4:45 ; 3.45 ; 13:45
3:45 PM | 15:45 ; 3:45 p.m. ; 3:45pm ; 03:45 PM | 3:45 AM ; 3:54 PM ; 4:45 PM ; 45 ; 3
7 p.m. | 7 PM ; 19:00 ; 7:00 PM ; 7pm | 7 a.m. ; 8 p.m. ; 7
10:05:30 | 10:05:30 ; \text{10:05:30} ; \textbf{10:05:30} | 10:05:31 ; 10:05 ; 30 ; 110:05:30
December 25, 2020 | 2020-12-25 ; 25 December 2020 ; Dec 25, 2020 ; December 25th, 2020 ; 12/25/2020 ; 25 Dec. 2020 | December 26, 2020 ; December 25, 2021 ; 2020 ; November 25, 2020 ; 25
2021-03-04 | March 4, 2021 ; 4 March 2021 ; 2021-3-4 | 2021-04-03 ; April 3, 2021 ; 2021 ; 4
March 5 | 5 March ; 5th of March ; Mar 5 ; March 5th ; March 5, 2020 | March 6 ; May 5 ; 5
05/12/2020 | 5/12/2020 | 12/05/2020 ; 05/12/2021 ; 05/13/2020 ; 2020
03/05 | 3/5 ; 03/05 ; \text{03/05} | 05/03 ; 5/3 ; 0.6 ; 6/10
05/12/20 | 5/12/20 ; 05/12/2020 | 05/20/12 ; 12/05/20
03-05-2020 | 3-5-2020 | 05-03-2020 ; -2022""",
    "text": r"""
Paris | paris ; PARIS ; \text{Paris} ; **Paris** ; Paris. ; "Paris" ; \textbf{Paris} | London ; Pairs ; Paris or London ; Par ; not Paris ; Parisian ; P
New York | new york ; New  York ; \text{New York} ; the New York ; New-York | York ; New Jersey ; York New ; New
no solution | No solution ; \text{no solution} ; No solution. ; \text{No solution} ; \textbf{no solution} | one solution ; solution ; no ; 0
Yes | yes ; YES. ; \text{Yes} ; \textbf{Yes} | No ; yes and no ; not yes ; Y
True | true ; \text{True} ; TRUE ; \textbf{True} | False ; not true ; 1
The Eiffel Tower | Eiffel Tower ; the eiffel tower ; \text{Eiffel Tower} | Eiffel ; Tower ; The Leaning Tower
\text{Evelyn} | Evelyn ; evelyn ; \mathrm{Evelyn} | Eve ; Adam ; nylevE
seventy-two | Seventy-two ; seventy two | seventy ; 72 apples ; seventy-three
3:4:5 | $3:4:5$ ; \text{3:4:5} | 5 ; 3:5:4 ; 3:4 ; 3:20 ; 3/20 ; 3:4:50
H2O | \text{H2O} ; h2o ; \textbf{H2O} | CO2 ; 2 ; H2
Route 66 | route 66 ; \text{Route 66} ; \textbf{Route 66} | 66 ; Route 67 ; Route
左 | \text{左} ; \textbf{左} | 右 ; 左右
2x3 | 2 x 3 ; 2×3 ; 2 \times 3 ; 2x3 matrix | 3x2 ; 3 x 2 ; 3×2 ; 2x4 ; 6
3 x 4 feet | 3x4 feet ; 3 x 4 ft ; 3 by 4 feet | 4 x 3 feet ; 3x4 meters ; 3 by 4 inches
5 remainder 2 | 5 Remainder 2 ; \text{5 remainder 2} | 2 remainder 5 ; 5 remainder 3 ; 5""",
    "mathematics": r"""
2\sqrt{3} | \sqrt{12} ; 2 \sqrt{3} ; 2*\sqrt{3} ; 2√3 ; 2 sqrt(3) ; \sqrt{3} \cdot 2 ; $2\sqrt{3}$ ; \frac{6}{\sqrt{3}} | 3 ; 2 ; \sqrt{3} ; 3\sqrt{2} ; 2\sqrt{2} ; 23 ; -2\sqrt{3} ; 6
x^2+1 | 1+x^2 ; x^{2}+1 ; x² + 1 ; x*x+1 ; $x^2 + 1$ | 1 ; x^2 ; x^2-1 ; 2 ; x^3+1 ; y^2+1 ; (x+1)^2 ; x^{21}
x+1 | 1+x ; x + 1 ; \frac{2x+2}{2} ; (x+1) | 1 ; x ; x-1 ; 2x+1 ; y+1
2c | c+c ; 2 \cdot c ; 2*c | 2 ; c ; 2d ; c^2
3R^2 | 3 R^2 ; 3R^{2} ; R^2 \cdot 3 | 3 ; 3R ; 2R^3 ; 9R^2 ; 3r^3
12\pi\text{ cm} | 12\pi ; 12\pi cm ; 12π cm ; \pi\cdot 12\text{ cm} | 12 ; 12 cm ; 12\pi\text{ m} ; 21\pi cm ; \pi
B, C | C, B ; B and C ; \text{B, C} ; \{C, B\} | B ; C ; B, D ; BCD ; A, B, C
2x | 2 x ; x+x ; 2\cdot x ; 2*x | 2 ; x ; 2y ; x^2 ; 2x+1
x=5 | 5 ; x = 5 ; x=5.0 ; x=\frac{10}{2} | x=6 ; y=5 ; -5 ; x
y = 2x+3 | y=3+2x ; 2x+3 ; y = 3 + 2x | 3 ; y=2x-3 ; y = 3x+2 ; x
\pi | pi ; π ; \pi. | 3 ; 3.14 ; 2\pi ; \pi^2 ; 22/7
\frac{\pi}{2} | \pi/2 ; pi/2 ; 0.5\pi ; π/2 ; \frac{1}{2}\pi | 2 ; \pi ; \frac{\pi}{3} ; 1.57 ; 2\pi ; 1/2
(1,2) | (1, 2) ; \left(1,2\right) ; (1, \frac{4}{2}) ; (1.0, 2.0) | \{1,2\} ; (2,1) ; [1,2] ; 2 ; 1 ; (1,3) ; (1,2,3) ; 12
(3, -1, 2) | (3,-1,2) ; \left(3, -1, 2\right) | (3,-1) ; (2,-1,3) ; (3,1,2) ; 2
[0,1) | [0, 1) ; \left[0,1\right) ; 0 \le x < 1 | [0,1] ; (0,1) ; (0,1] ; 1 ; [0,2) ; [1,0)
[0,1] | [0, 1] ; 0 \leq x \leq 1 ; x \in [0,1] | (0,1) ; [0,1) ; 1 ; [0,2] ; 0
(-\infty, 3] | (-\infty,3] ; x \le 3 ; \left(-\infty,3\right] ; (-∞, 3] ; x ≤ 3 | (-\infty,3) ; 3 ; [3,\infty) ; x<3 ; (-\infty,-3]
(-\infty,-1)\cup(1,\infty) | (-∞,-1) ∪ (1,∞) ; (1,\infty)\cup(-\infty,-1) | (-1,1) ; (-\infty,-1) ; (1,\infty) ; 1 ; (-\infty,-1]\cup(1,\infty)
\{1,2\} | \{2,1\} ; \{1, 2\} ; 1, 2 ; 2, 1 ; 1 and 2 ; \{1.0, 2\} | \{1\} ; \{1,3\} ; 2 ; 1 ; [1,2] ; (1,2) ; \{1,2,3\} ; 12
1, 2 | 2, 1 ; 1,2 ; \{1,2\} ; 1 and 2 ; 1 or 2 ; x=1, x=2 | 1 ; 2 ; 1, 3 ; 12 ; 1, 2, 3
1, 2, 3 | 3, 2, 1 ; \{1,2,3\} ; 1, 2 and 3 | 3 ; 1, 2 ; 123 ; 6 ; 1,2,4
x = 1 or x = -2 | -2, 1 ; x=-2, x=1 ; x = -2 or x = 1 ; \{1,-2\} | 1 ; -2 ; x=1 ; 1, 2 ; -1, 2
\pm 2 | 2, -2 ; \{-2, 2\} ; ±2 ; -2 and 2 | 2 ; -2 ; \pm 3 ; 4
1 \le x < 2 | [1,2) ; 1 \leq x < 2 ; 2 > x \ge 1 | 1 < x < 2 ; [1,2] ; 2 ; (1,2)
x > 3 | 3 < x ; (3,\infty) ; x>3 | x < 3 ; x \ge 3 ; 3 ; [3,\infty) ; x > 4
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix} ; \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix}1&2\\4&3\end{pmatrix} ; 4 ; \begin{pmatrix}1&2\end{pmatrix} ; 1
2+3i | 3i+2 ; 2 + 3i | 3 ; 2 ; 2-3i ; 3+2i ; 5
\log_2 3 | \frac{\ln 3}{\ln 2} ; \log_{2}{3} ; \log_2(3) | 3 ; 2 ; \log_3 2 ; 1.58
e^{x} | e^x ; \exp(x) | x ; e ; e^{2x} ; x^e
\sqrt[3]{2} | 2^{1/3} ; 2^{\frac{1}{3}} | \sqrt{2} ; 2 ; 3 ; \sqrt[3]{3} ; 3\sqrt{2}
\sin x | \sin(x) ; sin(x) ; \sin{x} | \cos x ; x ; \sin 2x ; \sin
f(x)=2x | f(x) = 2x ; 2x ; f(x)=x+x | 2 ; x ; f(x)=3x ; g(x)=x
\frac{x+1}{x-1} | (x+1)/(x-1) ; \frac{1+x}{x-1} | 1 ; \frac{x-1}{x+1} ; x+1 ; -1
\emptyset | \varnothing ; \{\} ; ∅ | 0 ; \{0\} ; \{1\}
\infty | ∞ ; +\infty ; infinity | -\infty ; 0 ; 8
3,5 | 3, 5 ; 3 and 5 ; (3,5) ; \{3,5\} ; x=3, x=5 | 5,3 ; 5, 3 ; 5 and 3 ; (5, 3) ; \{5,3\} ; 3 ; 5
3,5 kg | 3,5 ; 3,5\text{ kg} | 5,3 kg ; 5,3 ; 3,5 g
€3,50 | 3,50 € ; 3,50 | 50,3 € ; $3,50
x = 3,5 | 3,5 ; x=3,5 | x = 5,3 ; 5,3
1,-2 | -2, 1 ; \{1,-2\} | 1, 2 ; -2
12\pi\text{ apples} | 12\pi ; 12\pi apples | 12\pi pears ; 12\pi kg""",
}


class Line(NamedTuple):
    kind: str
    gold: str
    right: list[str]
    wrong: list[str]


def _line(kind: str, line: str) -> Line:
    gold, right, wrong = line.split(" | ")
    return Line(kind, gold, right.split(" ; "), wrong.split(" ; "))


LINES = [_line(kind, line) for kind, lines in TABLE.items() for line in lines.strip().splitlines()]
