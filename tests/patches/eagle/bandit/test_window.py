from flashpatch.patches.eagle.bandit.rules.windowed import Window


def test_an_arm_that_left_the_window_keeps_its_rate():
    window = Window(2, 3)
    window.add(0, 10.0, 2.0)
    for _ in range(5):
        window.add(1, 1.0, 1.0)
    assert window.pulls == [0, 3]
    assert window.rate == [5.0, 1.0]
