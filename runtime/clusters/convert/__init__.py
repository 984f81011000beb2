"""Makes the settings of a stack of the cluster file that `ray up` took, as Marin's are."""
